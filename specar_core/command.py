"""Where the `specar` command begins: Ctrl-C ends it in one line also while its modules are being imported."""

import sys


def main() -> None:
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("specar: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

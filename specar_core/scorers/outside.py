"""Scorers in an environment of their own: their packages pin old releases of others and cannot be imported here.

A Python that has the package runs worker.py and answers through pipes: a line of JSON for each line of JSON.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecarError

WORKER = Path(__file__).with_name("worker.py")
Ask = Callable[..., Any]


@dataclass(frozen=True)
class Outside:
    """variable: tells its Python; weighs: what it downloads when it first runs; folder, packages, before: how to
    install it. Its function in worker.py is called like it."""

    title: str
    variable: str
    weighs: str
    folder: str
    packages: str
    before: str = ""

    @property
    def install(self) -> str:
        """For a shell."""
        return (
            f"{self.before}python3.11 -m venv {self.folder} && {self.folder}/bin/pip install {self.packages} && "
            f"export {self.variable}=$PWD/{self.folder}/bin/python"
        )

    def missing(self) -> str | None:
        """Why it cannot run here, with what to do."""
        if os.environ.get(self.variable):
            return None
        return f"{self.title} needs an environment of its own, and downloads {self.weighs}. Once:\n{self.install}"

    @contextmanager
    def open(self, *arguments: str) -> Iterator[Ask]:
        """Gives ask(data=b"", **question): what its function answers; data is bytes that it reads after the question.

        arguments: of the function. Raises SpecarError if it does not start, or ends.
        """
        if reason := self.missing():
            raise SpecarError(reason)
        command = [os.environ[self.variable], str(WORKER), self.title, *arguments]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise SpecarError(f"{command[0]} cannot be run ({error.strerror}). To install it: {self.install}") from None
        assert process.stdin and process.stdout
        questions, answers = process.stdin, process.stdout

        def answer() -> Any:
            if line := answers.readline():
                return json.loads(line)
            raise SpecarError(f"{self.title} ended; its own words are above. To install it: {self.install}")

        def ask(data: bytes = b"", **question: Any) -> Any:
            with suppress(BrokenPipeError):
                questions.write(json.dumps(question).encode() + b"\n" + data)
                questions.flush()
            return answer()

        with process:  # waits for it; it ends with its pipe
            try:
                answer()  # that it is ready
                yield ask
            finally:
                with suppress(BrokenPipeError):  # it ended by itself
                    questions.close()

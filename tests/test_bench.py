"""`specar bench`: the studies of the repository, from wherever it is called."""

import json

from test_cli import refused, specar

from specar_core import bench

STUDY = """
import json, os, sys

def main():
    print(json.dumps([sys.argv[1:], os.getcwd()]))
    sys.exit(3)

if __name__ == "__main__":
    main()
"""


def test_a_study_gets_its_options_and_its_exit_code_is_the_commands(tmp_path, monkeypatch, capfd):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "fake.py").write_text(STUDY)
    (tmp_path / "benchmarks" / "common.py").write_text("shared = 1\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert specar("bench", "fake", "--help", "--k", 2, "x").exit_code == 3
    assert json.loads(capfd.readouterr().out) == [["--help", "--k", "2", "x"], str(tmp_path / "elsewhere")]
    refused(2, "unknown study 'common'; known are fake", "bench", "common")


def test_an_installed_package_has_no_studies(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    refused(2, "in SpecAR's repository only", "bench", "policies")


def test_the_studies_of_policies_are_there():
    refused(2, "policies, policy_times", "bench", "nothing")

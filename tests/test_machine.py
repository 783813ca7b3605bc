"""What the machine has: memory and disk space."""

from pathlib import Path

import pytest

from specar_core.errors import SpecarError
from specar_core.machine import free_bytes, host_memory


@pytest.mark.parametrize(
    "group, files, limit",
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "123"}, 123),
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}, None),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "77", "sys/fs/cgroup/a/b/memory.max": "max"}, 77),
        ("0::/only/outside", {"sys/fs/cgroup/memory.max": "55"}, 55),
        ("9:memory:/docker/x", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "99"}, 99),
        ("9:cpu,memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "88"}, 88),
        ("9:cpu:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "88"}, None),
    ],
)
def test_limits_of_control_groups_count(tmp_path, group, files, limit):
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    everything = host_memory(tmp_path / "nothing there")
    assert host_memory(tmp_path) == (limit or everything) and everything > 1e9


def test_free_space_of_a_drive_that_is_not_there(monkeypatch, tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.5)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(SpecarError, match="There is no .*choose another folder"):
        free_bytes(Path("/drive/folder"))

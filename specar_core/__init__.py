"""SpecAR: long video by a drafter and a target that share one rollout."""

__version__ = "0.1.0"

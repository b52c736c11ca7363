"""What a peer of a pipeline says of itself, for tests."""

from typing import Any

from farflung.protocol.pipeline_messages import Load, Present

NOTHING_YET = Load(0.0, 0.0, 0.0)


def says(stage: int, **changes: Any) -> Present:
    """A peer that trains in its stage and is free."""
    return Present(
        **{
            "stage": stage, "wants": -1, "trains": True, "free": True, "step": 0, "window": b"", "finished": False, "version": 0, "digest": b"", "forward_s": 0.0,
            "up_bytes_per_s": 0.0, "admission": b"", "addresses": (), "appointments": (), "peers": (), "since": 0, "load": NOTHING_YET, "fits": (), **changes,
        }
    )  # fmt: skip

"""What a peer of a pipeline says of itself, for tests."""

from typing import Any

from farflung.protocol.pipeline_messages import Load, Present

NOTHING_YET = Load(0.0, 0.0, 0.0)


def says(stage: int, **changes: Any) -> Present:
    """A peer that trains in its stage and is free."""
    return Present(
        **{
            "stage": stage, "life": 0, "wants": -1, "trains": True, "free": True, "step": 0, "window": b"", "finished": False, "version": 0, "digest": b"", "forward_s": 0.0,
            "up_bytes_per_s": 0.0, "admission": b"", "addresses": (), "appointments": (), "peers": (), "lives": (), "lost": (),
            "step_s": 0.0, "losses_per_hour": 0.1, "grad_norm": 0.0, "shadows": (), "since": 0, "load": NOTHING_YET, "fits": (), **changes,
        }
    )  # fmt: skip

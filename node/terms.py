"""What a swarm agrees on, as a node of it needs it: from the manifest by `recipe`, of one stage's chain by `stage_recipe`."""

from dataclasses import dataclass

from farflung.compression.policy import FlatCodec
from farflung.node.trainer import Pace
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.training.rules import OuterRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """See the module."""

    settings: Settings
    """The protocol's rules."""
    pace: Pace
    """The rhythm of training."""
    uplink: FlatCodec
    """Of contributions."""
    downlink: FlatCodec
    """Of means."""
    feedback: FeedbackSpec
    outer: OuterRule
    """What moves outer parameters in a round."""

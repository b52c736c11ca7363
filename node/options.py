"""What a person asks of `create`, `join` and `export`: plain data between the command line and the daemon.

`None` means "not said": the TOML file, the manifest or the machine decides. Checks here are those that need
no model, no network and no file, so that a wrong flag fails before anything heavy is imported.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_LABEL
from farflung.protocol.naming import check_name
from farflung.protocol.types import LABEL
from farflung.training.methods import DEFAULT

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d|:[1-9]\d)?")
"""torch knows more kinds, and nothing here is made for them."""

DTYPES = ("auto", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateOptions:
    """`farflung create`: what the manifest shall say. A flag wins over the TOML file."""

    name: str
    """Name of the swarm, for people; scoped by the founder's key."""
    config: Path | None = None
    """TOML file with the manifest's keys."""
    preset: str | None = None
    """Named size of the model."""
    start: Path | None = None
    """Folder with the model to train on from; None: weights are drawn."""
    method: str = "default"
    """Named settings of optimisers, rounds and codecs, for what neither a flag nor the file says."""
    data: str | None = None
    """`python` (embedded corpus), a text file or folder, a folder of token shards, or `hf:DATASET`."""
    tokenizer: str | None = None
    """`bytes` or a `tokenizers` JSON file."""
    steps: int | None = None
    """Global inner steps after which the swarm is done."""
    inner_steps: int | Literal["auto"] | None = None
    """H: inner steps between two rounds."""
    fragments: int | Literal["auto"] | None = None
    """P: parts of the model that are synchronised in turn."""
    delay_steps: int | Literal["auto"] | None = None
    """tau: inner steps that a peer may train while a round is under way."""
    batch_tokens: int | None = None
    """Tokens of one inner step of one peer, or of the whole pipeline."""
    stages: int | None = None
    """Parts of the model that different peers hold; 1: every peer holds all of it."""
    skip: float | None = None
    """Share of the stages that a microbatch leaves out."""
    routing: str | None = None
    """Who chooses the peers on a microbatch's way: `planned` or `dynamic`."""
    microbatches: int | None = None
    """Of one step of the pipeline."""
    optimizer: str | None = None
    """Inner optimiser: `adamw`, `muon` or `torch.optim.CLASS`, with arguments in parentheses."""
    lr: float | None = None
    """Peak learning rate of the inner optimiser."""
    min_contributors: int | None = None
    """Peers that must contribute for a round to move the outer state."""
    codec: str | None = None
    """How contributions and means are packed, as `int8(block=128)`."""
    feedback: bool | None = None
    """Whether what a codec leaves out is remembered and sent later; None: as the method has it, of `none` with codecs that leave out much."""
    open: bool = False
    """Anybody who finds the name may join; otherwise an invitation is needed."""
    seed: int | None = None
    """Seed of the first parameters and of the order of the samples."""
    peers: tuple[str, ...] = ()
    """Addresses of peers through which manifest and name are published at once; without any, this machine's node is the first of
    the DHT and publishes them itself.
    """
    port: int | None = None
    """Port this machine's node will listen on, for the addresses in the invitation. None: a free one is chosen now and kept; 0: any, each
    time it starts, so the invitation cannot name it.
    """
    local: bool = False
    """The swarm stays on this machine: the invitation names 127.0.0.1."""
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        check_name(self.name)
        _positive(
            steps=self.steps,
            inner_steps=None if self.inner_steps == "auto" else self.inner_steps,
            fragments=None if self.fragments == "auto" else self.fragments,
            batch_tokens=self.batch_tokens,
            stages=self.stages,
            microbatches=self.microbatches,
            lr=self.lr,
            min_contributors=self.min_contributors,
        )
        _port(self.port)


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedSwarm:
    """What `create` hands back to be printed."""

    name: str
    full_name: str
    """With the founder's fingerprint: what the name is called elsewhere."""
    hash_hex: str
    """Hash of the manifest: the swarm's id."""
    invitation: str
    """The short string to give to others."""
    addresses: tuple[str, ...]
    """Where the invitation says that somebody is to be found; without any it is of no use to others."""
    port: int
    """Where this machine's node will listen, unless told otherwise; 0: anywhere."""
    published: bool
    """Whether manifest and name are in the DHT by now; otherwise this machine's node puts them there when it starts."""
    founder: str
    """Public key of the founder in hex."""
    manifest: Path
    """Where the signed manifest lies."""
    about: str
    """What is to be trained, in a sentence."""
    samples: int
    """What of the data is trained on in an epoch."""
    heldout_tokens: int | None
    """What of it is held out; None of a stream, which holds out rows of any length."""
    end_of_text: str = ""
    """The token of the tokenizer's file that ends a text; empty of bytes."""
    layers: tuple[int, ...] = ()
    """Of a pipeline, those of each stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOptions:
    """`farflung join`: which swarm, and what this machine gives to it."""

    swarm: str
    """A name, an invitation, or the beginning of a known manifest hash."""
    peers: tuple[str, ...] = ()
    """Addresses of peers to ask first."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: str = "auto"
    """Precision of the inner steps: `auto` is bf16 autocast where the device has it, else fp32."""
    compile: bool = False
    """Compile the model (minutes at the start, faster steps)."""
    memory_gb: float | None = None
    """Most memory of the device that this node may use, in 10^9 bytes; None is what is free."""
    save_memory: str = "auto"
    """`auto` takes what is needed, the cheapest first; `none`; or any of `checkpoint`, `offload` and `8bit`, with commas."""
    stage: int | None = None
    """Of a pipeline: which to serve. None takes that of the last time, or of those that fit the one that needs a peer most."""
    region: str = ""
    """Of a pipeline: where this machine stands, so that copies of its stage are kept elsewhere; empty: unknown."""
    owner: str = ""
    """Of a pipeline: whose machine it is, the same for all of one person, so that they do not hold each other's copies; empty: unknown."""
    threads: int | None = None
    """CPU threads torch may use."""
    up_mbps: float | None = None
    """Most megabits per second this node may send."""
    down_mbps: float | None = None
    """Most megabits per second this node may receive in bulk."""
    port: int | None = None
    """Port to listen on, TLS on the one above; 0 lets the system choose. None: that of the last time, or of the founding, else a free one."""
    local: bool = False
    """Listen on 127.0.0.1 only, and ask no router for anything."""
    data: str | None = None
    """Where the swarm's data lies here, when elsewhere than the manifest says."""
    tokenizer: Path | None = None
    """The swarm's tokenizer file, when it has one and this machine does not know it yet."""
    exit_when_done: bool = True
    """End when the swarm has done its steps; otherwise stay and serve state to others."""
    live: bool = True
    """Show progress on the terminal."""
    as_json: bool = False
    """Print events on stdout instead, a line of JSON each, and what is said besides on stderr."""
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        _positive(memory=self.memory_gb, threads=self.threads, up_mbps=self.up_mbps, down_mbps=self.down_mbps)
        _label("--region", self.region)
        _label("--owner", self.owner)
        _port(self.port)
        _runtime(self.device, self.dtype)
        _save_memory(self.save_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """`farflung doctor`: which model, and what this machine would give to it."""

    swarm: str | None = None
    """Name or beginning of the manifest hash; None means the only swarm of this machine. Not looked at with `model`."""
    model: str | None = None
    """A preset, instead of a swarm's model."""
    vocab_size: int = 257
    """Of the preset's tokenizer; 257 is that of bytes."""
    optimizer: str = DEFAULT.optimizer
    """The preset's inner optimiser."""
    batch: int = 16
    """The preset's sequences in one inner step."""
    device: str = "auto"
    dtype: str = "auto"
    memory_gb: float | None = None
    save_memory: str = "auto"
    """These as in `JoinOptions`."""
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        _positive(memory=self.memory_gb, vocab_size=self.vocab_size, batch=self.batch)
        _runtime(self.device, self.dtype)
        _save_memory(self.save_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """`farflung export`: the outer state of a swarm as a Hugging Face folder."""

    swarm: str | None
    """Name or beginning of the manifest hash; None means the only swarm of this machine."""
    folder: Path
    """Where to write; must not exist or be empty."""
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ConfigError(f"{self.folder} exists and is not an empty folder; name a new one")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """`farflung eval`: held-out loss of the model that is here, whole and with stages left out."""

    swarm: str | None
    """Name or beginning of the manifest hash; None means the only swarm of this machine."""
    skip_stages: tuple[str, ...] = ()
    """Each `2,4`, stages to leave out together, or `25%`, every choice of so many of them."""
    data: str | None = None
    """Where the swarm's data lies here, when elsewhere than known."""
    device: str = "auto"
    dtype: str = "auto"
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        _runtime(self.device, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """`farflung sample`: text of the model that is here."""

    swarm: str | None
    """Name or beginning of the manifest hash; None means the only swarm of this machine."""
    prompt: str
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    device: str = "auto"
    dtype: str = "auto"
    home: Path | None = None
    """Replaces all folders."""

    def __post_init__(self) -> None:
        _runtime(self.device, self.dtype)


def number_or_auto(flag: str, text: str | None) -> int | Literal["auto"] | None:
    """What a flag says that takes a whole number, or `auto`. Raises ConfigError."""
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise ConfigError(f"{flag} must be a whole number or auto, not {text!r}")
    return int(text)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0 and finite, not {value}")


def _label(flag: str, text: str) -> None:
    if len(text) > MAX_LABEL or not re.search(LABEL, text):
        raise ConfigError(f"{flag} has up to {MAX_LABEL} of a-z, 0-9, '.', '_' and '-', as eu-west, not {text!r}")


def _runtime(device: str, dtype: str) -> None:
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"--device {device!r}: give auto, cpu, cuda, cuda:N or mps")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")


def _save_memory(text: str) -> None:
    words = {word.strip() for word in text.split(",")}
    if text not in ("auto", "none") and not words <= {"checkpoint", "offload", "8bit"}:
        raise ConfigError(f"--save-memory must be auto, none, or any of checkpoint, offload and 8bit, not {text!r}")


def _port(port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}")

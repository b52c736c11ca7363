"""What `farflung create` says of the swarm that it has founded: to scripts, and to people."""

from collections.abc import Iterator
from typing import Any

from farflung.node.options import CreatedSwarm, CreateOptions


def facts(made: CreatedSwarm, asked: CreateOptions) -> dict[str, Any]:
    """For `--json`."""
    return {
        "name": made.name,
        "full_name": made.full_name,
        "hash": made.hash_hex,
        "founder": made.founder,
        "open": asked.open,
        "about": made.about,
        "samples": made.samples,
        "heldout_tokens": made.heldout_tokens,
        "end_of_text": made.end_of_text,
        "layers": list(made.layers),
        "addresses": list(made.addresses),
        "port": made.port,
        "published": made.published,
        "invitation": made.invitation,
        "manifest": str(made.manifest),
    }


def lines(made: CreatedSwarm, asked: CreateOptions) -> Iterator[str]:
    """For people."""
    yield f"swarm {made.name} founded ({made.hash_hex[:12]}), full name {made.full_name}"
    yield made.about
    held_out = "" if made.heldout_tokens is None else f", {made.heldout_tokens:,} tokens held out"
    yield f"{made.samples:,} samples of the data to train on{held_out}"
    if made.end_of_text:
        yield f"a text ends with the tokenizer's {made.end_of_text}; another is said by data.end_of_text (--config)"
    if made.layers:
        stages = f"{len(made.layers)} stages of {' + '.join(map(str, made.layers))} layers"
        yield f"{stages}; the first has the head besides"
    if asked.open:
        yield "anybody who finds the name may join and send it anything; founded with --open"
    if made.published:
        yield f"published in the DHT, under its name and its hash, through {', '.join(asked.peers)}"
    else:
        yield "published when this machine's node starts: it puts it into the DHT, under its name and its hash"
    here = " --local" if asked.local else ""
    yield f"\nstart this machine's node:   farflung join {made.name}{here}"
    yield f"others join with:            farflung join {made.invitation}{here}"
    if not made.addresses:
        yield "it names no address yet, because of --port 0: wait for what that node prints, or `farflung invite`"
    elif not made.published:
        yield f"it is good as soon as that node runs, on port {made.port} as it says"

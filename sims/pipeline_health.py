"""Whether all is well with a swarm with a pipeline: what is judged once nothing has gone wrong for a while (invariant 0)."""

from farflung.node.stage_peer import StagePeer
from farflung.sims.pipeline_swarm import PipelineSwarm


def lacks(swarm: PipelineSwarm) -> list[str]:
    """What is not as it should be, for people: stages that nobody trains in, peers that do not train, other bytes at the same version."""
    found = []
    for stage in range(swarm.recipe.manifest.pipeline.stages):
        if not any(node.pipeline.recipe.stage == stage and node.trains for node in swarm.peers.values()):
            found.append(f"nobody trains in stage {stage}")
    for peer, task in sorted(swarm.tasks.items()):
        node = swarm.peers.get(peer)
        if task.done() or (node is not None and (node.trains or _has_no_place(swarm, node))):
            continue
        found.append(f"peer {peer} is outside" if node is None else f"peer {peer}: {node.state_reason}")
    for stage, held in swarm.digests().items():
        versions = [version for version, _ in held]
        if len(set(versions)) < len(versions):
            found.append(f"peers of stage {stage} hold other bytes")
    return found


def _has_no_place(swarm: PipelineSwarm, node: StagePeer) -> bool:
    """Whether it knows the history of its stage, and the group is full without it."""
    member = node.member
    return member.started and not member.in_view and len(member.head.commit.view) >= swarm.recipe.manifest.max_group


def finished(swarm: PipelineSwarm) -> bool:
    """Whether some stage has made the last round of the run."""
    manifest = swarm.recipe.manifest
    newest = [judge.history[max(judge.history)] for judge in swarm.judge.chains.values() if judge.history]
    return any(manifest.laps.finished(manifest.total_steps - commit.steps) for commit in newest)

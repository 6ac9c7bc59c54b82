"""Say what has become of keys that files for older releases may have."""

REMOVED = {
    "agent.options": "pytest prints what the agent needs",
    "agent.port": "the loopback of a sandbox is its own, so any port is free",
    "engine.one_way": 'write engine.faults = ["one_way"]',
    "engine.plain": 'write engine.faults = ["plain"]',
    "engine.update_s": 'write the seconds into engine.faults, as in ["3"]',
    "grader.resolved_reward": "it is 1; change unresolved_reward and cheated_reward",
    "groups.hard_max_staleness": "groups.max_staleness is at most 8",
    "inference.port": "each engine takes a free port",
    "learner.batch_wait_s": "it follows coordinator.wait_s and supervision.stuck_s",
    "learner.loss.dual_clip": "it is 3, as in the paper on dual-clip PPO",
    "learner.optimizer.beta1": "it is 0.9",
    "learner.optimizer.eps": "it is 1e-8",
    "rollout.engine_wait_s": "a worker waits for an engine for ten minutes",
    "sampling.min_p": "training samples the unchanged distribution; see eval.decodings",
    "sampling.temperature": "training samples the unchanged distribution; see eval.decodings",
    "sampling.top_k": "training samples the unchanged distribution; see eval.decodings",
    "sampling.top_p": "training samples the unchanged distribution; see eval.decodings",
    "sandbox.limits.nice": "commands have niceness 10",
    "sandbox.output_bytes": "64,000 bytes of a command's output are kept",
    "sandbox.read_bytes": "files of at most 1,000,000 bytes are read",
    "sft.episodes": 'hpc_swe.export_episodes writes rows for sft.source = "trajectories"',
    "sft.min_reward": "hpc_swe.export_episodes has --min-reward",
    "taskset.workdir": "tasks lie in /work, and repositories in /testbed",
}
"""Name of a key that 0.2 has removed -> what holds instead."""

"""Train configs/repair_1b.toml's tasks with TRL's GRPOTrainer: python -m tests.bench.peer_trl MODEL ROWS OUT.

The model, tasks, prompt, group size, length of answers, clip, learning rate and grader are those of the
configuration. What TRL decides itself keeps its default, but for what would make the comparison unequal.
TRL 1.16 with vLLM 0.26 and one GPU are needed. Each line of OUT/steps.jsonl is one optimizer step: seconds,
samples, sampled tokens, mean reward, and the seconds in which rewards were computed.
"""

import argparse
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hpc_swe.agents.loops.answer_agent import INSTRUCTIONS, AnswerAgent, opening
from hpc_swe.agents.loops.base import Reply
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.tasks import patch
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.sets.programs import Programs

LOGGED = ("reward", "entropy", "grad_norm", "step_time", "sampling/sampling_logp_difference/mean")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--answer", type=int, default=768, help="most tokens of an answer")
    parser.add_argument("--micro", type=int, default=16, help="sequences of one forward pass")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory, for vLLM")
    parser.add_argument("--slots", type=int, default=16, help="gradings at once")
    parser.add_argument("--save", type=int, default=5, help="steps between two saved models")
    return parser.parse_args()


class Rewards:
    """Grade answers as a run does, and count the time that it takes."""

    def __init__(self, given: argparse.Namespace):
        source = Programs(train=given.rows, first_message="statement", timeout_s=5.0)
        self.tasks = {task.task_id: task for task in itertools.islice(source.load("train"), given.tasks)}
        self._agent = AnswerAgent(form="function", show_files=False)
        self._grader, self._sandboxes = Pytest(), Process()
        self._pool = ThreadPoolExecutor(given.slots)
        self.seconds, self.tokens, self.samples = 0.0, 0, 0

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], task_id: list[str], **_: object
    ):
        began = time.monotonic()
        rewards = list(self._pool.map(self._grade, task_id, [each[0]["content"] for each in completions]))
        self.seconds += time.monotonic() - began
        self.tokens += sum(map(len, completion_ids))
        self.samples += len(completions)
        return rewards

    def _grade(self, task_id: str, text: str) -> float | None:
        task = self.tasks[task_id]
        try:
            with self._sandboxes.open(task) as sandbox:
                self._agent.solve(task, sandbox, lambda _messages, _tools="": Reply(text))
                handed_in = patch.take(task, sandbox, self._sandboxes)
            return self._grader.grade(task, handed_in, self._sandboxes).reward
        except SandboxError as error:
            print("sandbox:", error, flush=True)
            return None

    def taken(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        found = {"reward_s": self.seconds, "tokens": self.tokens, "samples": self.samples}
        self.seconds, self.tokens, self.samples = 0.0, 0, 0
        return found


class Steps(TrainerCallback):
    """Write a line for each optimizer step."""

    def __init__(self, out: Path, rewards: Rewards):
        self._file, self._rewards = out / "steps.jsonl", rewards

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._at = time.monotonic()

    def on_log(
        self, args: object, state: Any, control: object, logs: dict[str, Any] | None = None, **_: object
    ) -> None:
        now = time.monotonic()
        line = {"step": state.global_step, "seconds": now - self._at, **self._rewards.taken()}
        line |= {name: value for name, value in (logs or {}).items() if name in LOGGED}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._at = now


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    rewards = Rewards(given)
    system = {"role": "system", "content": INSTRUCTIONS["function"]}
    rows = [
        {"task_id": name, "prompt": [system, {"role": "user", "content": opening(task, {})}]}
        for name, task in rewards.tasks.items()
    ]
    config = GRPOConfig(
        output_dir=str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=given.micro,
        gradient_accumulation_steps=given.groups * given.group_size // given.micro,
        num_generations=given.group_size,
        max_completion_length=given.answer,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # token_mean
        scale_rewards="none",  # scale_by_std = false
        learning_rate=3e-6,
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="steps",
        save_steps=given.save,
        save_only_model=True,
        report_to=[],
        seed=0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=given.share,
        vllm_max_model_length=4096,  # rollout.context
        vllm_importance_sampling_mode="token_truncate",  # token by token, as sampler_ratio corrects
        model_init_kwargs={"dtype": "float32"},  # main weights; the forward pass is bfloat16, as Megatron's
    )
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=rewards.__call__,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps(given.out, rewards)],
    )
    trainer.train()
    trainer.save_model(str(given.out / "last"))


if __name__ == "__main__":
    main()

"""Two adapters learn two tasks on one base, at the same time: a whole loop of reinforcement learning, on the public verbs."""

import random

import motet
from motet.algorithms import Grpo

STEPS, PROBLEMS, ANSWERS, LONGEST = 15, 16, 8, 8
TASKS = {
    "backwards": lambda word: (f"Write {word} backwards.", word[::-1]),
    "in-order": lambda word: (f"Sort the letters of {word}.", "".join(sorted(word))),
}


def problems(task: str, step: int) -> list[motet.Problem]:
    """The problems of a step."""
    draw = random.Random(f"{task} {step}")
    made = [TASKS[task]("".join(draw.sample("ABCDEFGHIJ", 3))) for _ in range(PROBLEMS)]
    return [motet.Problem(i, (motet.Message("user", question),), answer) for i, (question, answer) in enumerate(made)]


def reward(rollout: motet.Rollout) -> float:
    """How many letters stand where they should."""
    said, answer = rollout.completion, rollout.problem.answer
    return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))


def main() -> dict[str, list[float]]:
    """The mean reward of each step, by task."""
    algorithm, curves = Grpo(), {task: [] for task in TASKS}
    with motet.Verbs("small") as verbs:
        for task in TASKS:
            verbs.add_adapter(task, rank=16)
        for step in range(STEPS):
            asked = {task: problems(task, step) for task in TASKS}
            sampled = verbs.sample(asked, ANSWERS, seed=step, max_tokens=LONGEST)  # decoded together
            batches = {}
            for task in TASKS:
                groups = [group.rewarded(reward) for group in sampled[task]]
                batches[task] = algorithm.batch(groups, LONGEST)  # advantages
                curves[task].append(sum(one.reward for group in groups for one in group.rollouts) / PROBLEMS / ANSWERS)
            verbs.forward_backward(batches, algorithm)  # one packed pass
            for task in TASKS:
                verbs.optim_step(task, motet.AdamW(lr=2e-3))  # what is sampled next comes from the new version
            print(f"step {step + 1:2}  " + "  ".join(f"{task} {curve[-1]:.2f}" for task, curve in curves.items()))
        for task in TASKS:
            verbs.save_adapter(task, f"runs/loop/{task}")  # PEFT directories
    return curves


if __name__ == "__main__":
    main()

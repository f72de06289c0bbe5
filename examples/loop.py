"""Two adapters learn two tasks on one base at once: a whole loop of RL."""

import random

import motet
from motet.algorithms import Grpo

STEPS, PROBLEMS, ANSWERS, TOKENS = 15, 16, 8, 8
TASKS = {
    "backwards": lambda word: (f"Write {word} backwards.", word[::-1]),
    "in-order": lambda word: (
        f"Sort the letters of {word}.",
        "".join(sorted(word)),
    ),
}


def problems(task: str, step: int) -> list[motet.Problem]:
    """Make the problems of a step."""
    draw, made = random.Random(f"{task} {step}"), []
    for number in range(PROBLEMS):
        question, answer = TASKS[task]("".join(draw.sample("ABCDEFGHIJ", 3)))
        message = motet.Message("user", question)
        made.append(motet.Problem(number, (message,), answer))
    return made


def reward(rollout: motet.Rollout) -> float:
    """Count the letters that stand where they should, as a share."""
    said, answer = rollout.completion, rollout.problem.answer
    right = sum(a == b for a, b in zip(said, answer, strict=False))
    return right / max(len(said), len(answer))


def main() -> dict[str, list[float]]:
    """Return the mean reward of each step, by task."""
    algorithm, curves = Grpo(), {task: [] for task in TASKS}
    with motet.Verbs("small") as verbs:
        for task in TASKS:
            verbs.add_adapter(task, rank=16)
        for step in range(STEPS):
            asked, batches = {task: problems(task, step) for task in TASKS}, {}
            # both adapters decode together
            sampled = verbs.sample(asked, ANSWERS, seed=step, max_tokens=TOKENS)
            for task, answered in sampled.items():
                groups = [group.rewarded(reward) for group in answered]
                batches[task] = algorithm.batch(groups, TOKENS)  # advantages
                rewards = [r.reward for group in groups for r in group.rollouts]
                curves[task].append(sum(rewards) / len(rewards))
            verbs.forward_backward(batches, algorithm)  # one packed pass
            for task in TASKS:  # the next samples are of the new version
                verbs.optim_step(task, motet.AdamW(lr=2e-3))
                print(f"step {step + 1:2}  {task:9}  {curves[task][-1]:.2f}")
        for task in TASKS:
            verbs.save_adapter(task, f"runs/loop/{task}")  # PEFT directories
    return curves


if __name__ == "__main__":
    main()

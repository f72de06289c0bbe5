"""The lines of metrics.jsonl, timings.jsonl and the rollout log. Pure functions.

metrics.jsonl holds nothing that depends on time or on other jobs; seconds and rates are in timings.jsonl.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from motet.core.batch import LossStats, OptimStats
from motet.core.device import BusyTime
from motet.core.types import Group, Rollout
from motet.rewards.reward_answers import MOST_LOGGED
from motet.runtime.step_records import LearnedStep, SampledStep

BESIDE = ("errors", "adapter_norm", "reward_range")
"""Fields of timings.jsonl that `Diagnoses` reads in the same line as those of metrics.jsonl."""
_REASONS, _REASON = 3, 300
"""Number of failure reasons that a step keeps, and their maximum characters."""
STEP_FIELDS: Mapping[str, str] = {
    "step": "the step, from 0; the last line has the number of steps and only the final evaluation",
    "version": "the adapter version that was sampled",
    "staleness": "the step minus the oldest version that sampled any of its tokens",
    "reward": "mean over scored rollouts; `null` if the job has no reward",
    "reward_std": "standard deviation over scored rollouts",
    "reward_parts": "mean of each reward",
    "reward_metrics": "mean of each number that reward functions log (`log_metric`, or entries beside `score`), if any",
    "length": "mean number of sampled tokens",
    "truncated": "share of rollouts that reached max_tokens or filled the context",
    "unread": "turns of which a part could not be read (a thought without an end, a broken call), if there are some; likewise "
    "`in_thought`, answers that end inside their thought",
    "turns": "with several turns: their mean number; likewise `tool_calls`, `tool_errors` (tool results that begin with "
    "`Error`) and `branches`",
    "rollouts": "rollouts sampled",
    "failed": "rollouts without a reward",
    "groups": "groups that have advantages",
    "no_signal": "share of groups whose rewards are all equal",
    "distinct": "share of a group's answers that differ from each other, mean over groups",
    "samples": "samples with a gradient",
    "tokens": "trainable tokens of these samples; the fields from `loss` to `lr` are over these tokens, and `null` without any",
    "trained": "trainable tokens per sampled token",
    "loss": "the loss before the update",
    "entropy": "mean entropy per token, nats",
    "ratio": "mean probability ratio policy / sampler",
    "ratio_max": "largest ratio",
    "clip_fraction": "share of tokens whose gradient the clip removed",
    "kl_sampler": "k3 estimate of KL(sampler ‖ policy) per token, nats",
    "kl_base": "k3 estimate of KL(policy ‖ `kl.reference`) per token, nats; with `distill`, to the teacher. On steps that "
    "evaluate, or on every step with a KL term",
    "logprob_gap": "largest |trainer − sampler| logprob; 0 on-policy on the embedded engine, if the base is exact",
    "grad_norm": "norm of the gradient before clipping",
    "lr": "learning rate of the update",
    "skipped": "whether the update was left out because the gradient was not finite",
    "value_loss": "with a critic: its loss before the update",
    "value_explained": "with a critic: share of the variance of the tokens' returns that its values explain",
    "accuracy": "with `dpo` and `kto`: share of pairs, or answers, on which the policy is on the right side of the reference; "
    "ties count half, so that version 0 has 0.5",
    "margin": "with `dpo`: how much more the chosen answers gained than the rejected ones, times beta",
    "roles": "with a [team](roles.md), for each role: reward, reward_std, the rollouts in which it took part, and its own "
    "fields from `tokens` to `lr`; in `eval`, the first three",
    "eval": "held-out evaluation of the version with the number of the step: reward, reward_std, reward_stderr (standard "
    "error of `reward` over the problems), reward_parts, length, truncated, rollouts, failed; with `sft` and "
    "`soft_targets` nll (mean negative log-likelihood of a token of the answers, nats) and tokens; with `dpo` and `kto` "
    "loss, accuracy and margin; with these four also rows",
}
"""Every field of metrics.jsonl."""


def step_record(sampled: SampledStep, learned: LearnedStep) -> dict[str, Any]:
    """The line of metrics.jsonl of one step; see `STEP_FIELDS`."""
    groups, batch, stats, valued = sampled.groups, learned.batch, learned.stats, learned.valued
    figures = group_metrics(groups)
    return {
        "step": sampled.step,
        "version": sampled.version,
        "staleness": sampled.step - sampled.oldest,
        **figures,
        **_trained_roles(figures, learned),
        "groups": batch.groups,
        "no_signal": sum(not group.has_signal for group in groups) / max(len(groups), 1),
        "distinct": distinct(groups),
        "samples": len(batch.samples),
        "tokens": stats.tokens,
        "trained": stats.tokens / max(sum(rollout.sampled for group in groups for rollout in group.rollouts), 1),
        **_trained(stats, learned.optim),
        "skipped": bool(learned.optim and learned.optim.skipped),
        **({} if valued is None else {"value_loss": valued.loss, "value_explained": valued.explained}),
    }


def trained_record(stats: LossStats, optim: OptimStats | None) -> dict[str, Any]:
    """Metrics of a step without sampling."""
    figures = _trained(stats, optim)
    return {
        "tokens": stats.tokens,
        **{name: figures[name] for name in ("loss", "entropy", "grad_norm", "lr")},
        "skipped": bool(optim and optim.skipped),
    }


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Metrics computed from rollouts alone, for a step or an evaluation."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if not rollout.error]
    rewards = np.array(_rewards(scored), np.float64)
    logged = _means([rollout.metrics for rollout in scored])
    lengths = [rollout.sampled for rollout in scored]
    return {
        "reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward_std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward_parts": _means([rollout.reward_parts for rollout in scored]),
        **({"reward_metrics": dict(list(logged.items())[:MOST_LOGGED])} if logged else {}),
        "length": float(np.mean(lengths)) if lengths else float("nan"),
        "truncated": float(np.mean([rollout.truncated for rollout in scored])) if scored else float("nan"),
        **_unread(scored),
        **_turns(scored),
        **_roles(scored),
        "rollouts": len(rollouts),
        "failed": len(rollouts) - len(scored),
    }


def _unread(scored: Sequence[Rollout]) -> dict[str, int]:
    """Numbers of turns that could not be read; empty if all could be."""
    unread = sum(bool(turn.parts.unread) for rollout in scored for turn in rollout.turns)
    inside = sum(rollout.turns[-1].parts.ends_in_thought for rollout in scored if rollout.turns)
    return {"unread": unread, "in_thought": inside} if unread else {}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it, in the order of names."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(values[name])) for name in sorted(values)}


def _rewards(scored: Sequence[Rollout]) -> list[float]:
    """The rewards of scored rollouts; empty if nothing rewards them, as in distillation."""
    return [rollout.reward for rollout in scored if rollout.reward_parts]


def _roles(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rewards by role; empty without a team."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        for role, own in rollout.roles.items():
            rewards.setdefault(role, []).append(own.reward)
    figures = {
        role: {"reward": float(np.mean(own)), "reward_std": float(np.std(own)), "rollouts": len(own)}
        for role, own in sorted(rewards.items())
    }
    return {"roles": figures} if figures else {}


def _trained_roles(figures: Mapping[str, Any], learned: LearnedStep) -> dict[str, Any]:
    """`roles` of a step, with the update of each."""
    known: Mapping[str, Mapping[str, Any]] = figures.get("roles", {})
    roles: dict[str, Mapping[str, Any]] = {}
    for role, step in sorted(learned.roles.items()):
        roles[role] = {**known.get(role, {}), "tokens": step.stats.tokens, **_trained(step.stats, step.optim)}
    return {"roles": roles} if roles else {}


def _turns(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of multi-turn rollouts; empty if all have one turn and no tool call."""
    if all(len(rollout.turns) <= 1 and not any(turn.tool_calls for turn in rollout.turns) for rollout in rollouts):
        return {}
    of_tools = [
        [reply.content for turn in rollout.turns if turn.tool_calls for reply in turn.replies] for rollout in rollouts
    ]
    counts = {
        "turns": [len(rollout.turns) for rollout in rollouts],
        "tool_calls": [sum(len(turn.tool_calls) for turn in rollout.turns) for rollout in rollouts],
        "tool_errors": [sum(text.startswith("Error") for text in texts) for texts in of_tools],
        "branches": [len(rollout.branches) for rollout in rollouts],
    }
    return {name: float(np.mean(values)) for name, values in counts.items()}


def distinct(groups: Sequence[Group]) -> float:
    """Share of a group's answers that differ from each other, mean over groups; 1 if no two are equal."""
    shares = [
        len({rollout.completion for rollout in group.scored}) / len(group.scored) for group in groups if group.scored
    ]
    return float(np.mean(shares)) if shares else float("nan")


def _trained(stats: LossStats, optim: OptimStats | None) -> dict[str, float | None]:
    """Metrics of the update; None, not 0, if nothing was trained."""
    tokens = max(stats.tokens, 1)
    figures = {
        "loss": stats.loss,
        "entropy": stats.entropy / tokens,
        "ratio": stats.ratio / tokens,
        "ratio_max": stats.ratio_max,
        "clip_fraction": stats.clipped / tokens,
        "kl_sampler": stats.kl_sampler / tokens,
        "kl_base": stats.kl_base / stats.kl_base_tokens if stats.kl_base_tokens else None,
        "logprob_gap": stats.logprob_gap,
        "grad_norm": None if optim is None else optim.grad_norm,
        "lr": None if optim is None else optim.lr,
    }
    return figures if optim is not None else dict.fromkeys(figures)


def evaluation_record(evaluation: SampledStep) -> dict[str, Any]:
    """The `eval` part of a line."""
    means = [np.mean(rewards) for group in evaluation.groups if (rewards := _rewards(group.scored))]
    error = float(np.std(means, ddof=1)) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return {**group_metrics(evaluation.groups), "reward_stderr": error}


def errors_of(groups: Sequence[Group]) -> dict[str, int]:
    """The most common reasons for missing rewards, shortened, with the number of rollouts for each."""
    reasons = Counter(rollout.error[:_REASON] for group in groups for rollout in group.rollouts if rollout.error)
    return dict(reasons.most_common(_REASONS))


def range_of(groups: Sequence[Group]) -> list[float] | None:
    """The lowest and the highest reward of an answer; None where nothing rewards them."""
    rewards = _rewards([rollout for group in groups for rollout in group.scored])
    return [min(rewards), max(rewards)] if rewards else None


def timing_record(
    step: int,
    seconds: Mapping[str, float],
    tokens_sampled: int,
    tokens_trained: int,
    busy: BusyTime,
    judge: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The line of timings.jsonl of one step: `judge` is what judges took so far, `beside` has fields of `BESIDE`."""
    elapsed = max(time.monotonic() - busy.started, 1e-9)
    return {
        **({"judge": dict(judge)} if judge else {}),
        "step": step,
        "time": time.time(),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "tokens_sampled": tokens_sampled,
        "tokens_trained": tokens_trained,
        "device": {
            "decode": round(busy.decode / elapsed, 4),
            "train": round(busy.train / elapsed, 4),
            "occupancy": round(busy.full / elapsed, 4),
        },
        **beside,
    }


def rollout_records(
    sampled: SampledStep, purpose: str, texts: Callable[[Sequence[int]], Sequence[str]]
) -> Iterable[dict[str, Any]]:
    """The lines of a rollout log, in data order. `purpose` is `train` or `eval`, `texts` returns the text of each token id."""
    for group in sampled.groups:
        prompt = group.problem.messages[-1].content
        for rollout in group.rollouts:
            yield {
                "purpose": purpose,
                "problem": group.problem.id,
                "index": rollout.index,
                "version": group.version,
                "prompt": prompt,
                "answer": group.problem.answer,
                "completion": rollout.completion,
                "turns": [turn.text for turn in rollout.turns],
                **_conversation(rollout, texts),
                "reward": rollout.reward,
                "reward_parts": dict(rollout.reward_parts),
                **{name: dict(value) for name, value in _logged(rollout) if value},
                "finish_reason": rollout.finish_reason.value,
                "tokens": rollout.sampled,
                "error": rollout.error,
                **_token_fields(rollout, texts),
            }


def _logged(rollout: Rollout) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return ("reward_metrics", rollout.metrics), ("extra", rollout.extra)


def _conversation(rollout: Rollout, texts: Callable[[Sequence[int]], Sequence[str]]) -> dict[str, Any]:
    """The environment's opening, its replies and the rewards of each turn."""
    fields: dict[str, Any] = {}
    if rollout.opening and rollout.branches:
        fields["opening"] = "".join(texts(rollout.prompt_ids.tolist()))
    if any(turn.replies for turn in rollout.turns):
        fields["replies"] = [[reply.content for reply in turn.replies] for turn in rollout.turns]
    if any(turn.reward is not None for turn in rollout.turns):
        fields["turn_rewards"] = [turn.reward for turn in rollout.turns]
    if rollout.roles:
        fields["roles"] = [turn.role for turn in rollout.turns]
        fields["role_rewards"] = {role: own.reward for role, own in rollout.roles.items()}
    if not all(turn.trained for turn in rollout.turns):
        fields["trained"] = [turn.trained for turn in rollout.turns]
    return fields


def _token_fields(rollout: Rollout, texts: Callable[[Sequence[int]], Sequence[str]]) -> dict[str, Any]:
    """Tokens and logprobs from the first sampled token of each branch; tokens that were only read have no logprob."""
    token_texts: list[str] = []
    logprobs: list[float | None] = []
    branches: list[dict[str, Any]] = []
    for branch in rollout.branches:
        branches.append({"turn": branch.turn, "after": branch.after, "token": len(token_texts)})
        start = int(branch.loss_mask.argmax()) if branch.sampled else len(branch.token_ids)
        token_texts += texts(branch.token_ids[start:].tolist())
        pairs = zip(branch.logprobs[start:].tolist(), branch.loss_mask[start:].tolist(), strict=True)
        logprobs += [round(logprob, 4) if own else None for logprob, own in pairs]
    several = {"branches": branches} if len(branches) > 1 else {}
    return {**several, "token_texts": token_texts, "logprobs": logprobs}

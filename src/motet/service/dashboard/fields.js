// What a line of metrics.jsonl holds, as charts of a job; the report of `motet run` uses the same words.

export const SMALL = [ // field, title, note, options
  ["length", "Length", "sampled tokens per rollout"],
  ["truncated", "Truncated", "share of rollouts that ran into max_tokens", {share: true}],
  ["no_signal", "Groups without signal", "share of groups whose rewards are all equal", {share: true}],
  ["distinct", "Distinct answers", "share of a group’s answers that differ", {share: true}],
  ["entropy", "Entropy", "nats per token"],
  ["kl_base", "KL to the base", "nats per token, on steps that evaluate", {joined: true}],
  ["kl_sampler", "KL to the sampler", "nats per token"],
  ["logprob_gap", "Logprob gap", "largest |trainer − sampler|", {plain: true}],
  ["grad_norm", "Gradient norm", "before clipping"],
  ["staleness", "Staleness", "steps that sampling ran ahead", {plain: true}],
  ["loss", "Loss", "before the update"],
  ["clip_fraction", "Clipped", "share of tokens whose gradient the clip removed", {share: true}],
  ["lr", "Learning rate", "of the update", {plain: true}],
];

/** Steps and values of what `read` finds in lines, where it is a number; where it is null there is a gap, unless `joined`. */
export function values(lines, read, joined = false) {
  const x = [], y = [];
  for (const line of lines) {
    const value = read(line);
    if (Number.isFinite(value) || (value === null && !joined)) {
      x.push(line.step);
      y.push(value);
    }
  }
  return {x, y};
}

/** Names of the parts of the reward, in the order of the job. */
export function partNames(lines) {
  const names = new Set();
  for (const line of lines) for (const name of Object.keys(line.reward_parts || line.eval?.reward_parts || {})) names.add(name);
  return [...names];
}

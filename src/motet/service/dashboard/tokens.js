// A rollout token by token, if tokens are known: the darker, the less likely for the sampler. Details on hover, or with focus and arrow keys.
import {el, say} from "./dom.js";
import {measured} from "./words.js";

const LEVELS = [0.05, 0.3, 0.8, 1.6, 2.8, 4.5]; // upper bounds of the levels of −logprob, in nats; the last level has none

function level(logprob) {
  return LEVELS.filter(bound => -logprob > bound).length;
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
}

function described(text, logprob) {
  const shown = `“${text.replaceAll("\n", "⏎")}”`;
  if (logprob === null) return `${shown} was read, not sampled`;
  const share = 100 * Math.exp(logprob);
  return `${shown} logprob ${logprob.toFixed(3).replace("-", "−")}, probability ${share >= 99.95 ? "100" : share.toPrecision(2)} %`;
}

/** Legend of the levels. */
export function scale() {
  return el("span", {class: "scale"}, "likely", el("span", {"aria-hidden": "true"}, [0, 1, 2, 3, 4, 5, 6].map(place => el("i", {class: `lp${place}`}))), "unlikely");
}

function reward({reward: value, reward_parts: parts}, earlier) {
  const change = [value, earlier?.reward].every(Number.isFinite) ? Math.sign(value - earlier.reward) : 0;
  const named = Object.entries(parts || {});
  return [el("span", {}, "reward ", el("b", {class: {1: "good", [-1]: "bad"}[change]}, measured(value), {1: " ▲", [-1]: " ▼"}[change])),
    named.length > 1 ? el("span", {}, named.map(([name, part]) => `${name} ${measured(part)}`).join(" · ")) : null];
}

/** A rollout with its reward, marked as better or worse than that of an earlier rollout. */
export function rolloutCard(rollout, earlier = null) {
  const ended = rollout.error ? el("p", {class: "bad small"}, rollout.error)
    : rollout.finish_reason === "length" ? el("p", {class: "warm small"}, "cut off at max_tokens") : null;
  const several = rollout.branches?.length > 1 ? ` · ${rollout.branches.length} branches` : "";
  return el("article", {class: "rollout"}, el("header", {}, reward(rollout, earlier), el("span", {}, `${rollout.tokens ?? 0} tokens${several}`)),
    rollout.opening ? el("p", {class: "opening small soft"}, rollout.opening) : null, tokens(rollout),
    rollout.turn_rewards && !begins(rollout).size ? el("p", {class: "small"}, `turns: ${rollout.turn_rewards.map(value => value === null ? "–" : measured(value)).join(" · ")}`) : null, ended);
}

/** Map from token index to the turn that begins there. A turn is a contiguous run of sampled tokens; empty if ambiguous. */
function begins({logprobs = [], turns = [], trained, branches = []}) {
  const parted = new Set(branches.map(one => one.token));
  const places = [...logprobs.keys()].filter(place => logprobs[place] !== null && (place === 0 || logprobs[place - 1] === null || parted.has(place)));
  const sampled = [...turns.keys()].filter(turn => trained?.[turn] !== false);
  return new Map(turns.length > 1 && places.length === sampled.length ? places.map((place, number) => [place, sampled[number]]) : []);
}

/** [label, branch] of the branches that `chosen` accepts; the label has their turns and where they began. */
function branches({branches: all = [], turns}, chosen) {
  return all.flatMap((one, number) => {
    if (all.length < 2 || !chosen(one)) return [];
    const end = all[number + 1]?.turn ?? turns.length, from = one.after === null ? "begins anew" : `goes on from turn ${one.after + 1}`;
    const own = end - one.turn > 1 ? `turns ${one.turn + 1}–${end}` : `turn ${one.turn + 1}`;
    return [[`branch ${number + 1} · ${own}${number ? ` · ${from}` : ""}`, one]];
  });
}

/** The spans, with a heading (number, reward) before each turn, and one (origin, text read there) before each branch. */
function inTurns(spans, rollout) {
  const turns = begins(rollout);
  return [...spans, null].flatMap((span, place) => {
    const turn = turns.get(place), worth = rollout.turn_rewards?.[turn] ?? null;
    const parted = branches(rollout, one => one.token === place).flatMap(([text, {turn: first}]) => {
      const read = rollout.replies?.[first - 1]?.join("\n");
      return [el("span", {class: "branch"}, text), read ? el("span", {class: "read"}, visible(read)) : null];
    });
    return [...parted, turn === undefined ? null : el("span", {class: "turn"}, `turn ${turn + 1}${worth === null ? "" : ` · reward ${measured(worth)}`}`), span];
  });
}

/** The tokens of a rollout, and a line that describes the token under the pointer. */
function tokens(rollout) {
  const texts = rollout.token_texts, readout = el("p", {class: "readout", "aria-live": "polite"});
  if (!texts?.length) {
    return (rollout.turns || [rollout.completion]).flatMap((text, turn) => [
      ...branches(rollout, one => one.turn === turn).map(([words]) => el("p", {class: "branch"}, words)), el("div", {class: "tokens"}, text || "(nothing)")]);
  }
  const spans = texts.map((text, place) => {
    const logprob = rollout.logprobs[place];
    return el("span", {class: logprob === null ? "read" : `lp${level(logprob)}`, data: {place}}, visible(text));
  });
  let now = null;
  const look = place => {
    now?.classList.remove("now");
    now = place === null ? null : spans[place];
    now?.classList.add("now");
    say(readout, place === null ? "" : described(texts[place], rollout.logprobs[place]));
  };
  const node = el("div", {
    class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move",
    onmouseover: event => { if (event.target.dataset.place) look(Number(event.target.dataset.place)); },
    onmouseleave: () => look(null),
    onblur: () => look(null),
    onkeydown: event => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      look(Math.max(0, Math.min(spans.length - 1, now === null ? 0 : Number(now.dataset.place) + step)));
    },
  }, inTurns(spans, rollout));
  return [node, readout];
}

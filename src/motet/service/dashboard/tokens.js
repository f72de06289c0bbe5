// A rollout, token by token where they are known: the darker, the less likely the sampler thought it. Hover, or focus and use the arrow keys.
import {el, say} from "./dom.js";
import {measured} from "./words.js";

const LEVELS = [0.05, 0.3, 0.8, 1.6, 2.8, 4.5]; // nats; a level each

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

/** What the levels mean. */
export function scale() {
  return el("span", {class: "scale"}, "likely", el("span", {"aria-hidden": "true"}, [0, 1, 2, 3, 4, 5, 6].map(place => el("i", {class: `lp${place}`}))), "unlikely");
}

function reward({reward: value, reward_parts: parts}, earlier) {
  const change = [value, earlier?.reward].every(Number.isFinite) ? Math.sign(value - earlier.reward) : 0;
  const named = Object.entries(parts || {});
  return [el("span", {}, "reward ", el("b", {class: {1: "good", [-1]: "bad"}[change]}, measured(value), {1: " ▲", [-1]: " ▼"}[change])),
    named.length > 1 ? el("span", {}, named.map(([name, part]) => `${name} ${measured(part)}`).join(" · ")) : null];
}

/** A rollout with its reward, and whether that is better or worse than an earlier one's. */
export function rolloutCard(rollout, earlier = null) {
  const ended = rollout.error ? el("p", {class: "bad small"}, rollout.error)
    : rollout.finish_reason === "length" ? el("p", {class: "warm small"}, "cut off at max_tokens") : null;
  return el("article", {class: "rollout"}, el("header", {}, reward(rollout, earlier), el("span", {}, `${rollout.tokens ?? 0} tokens`)),
    rollout.opening ? el("p", {class: "opening small soft"}, rollout.opening) : null, tokens(rollout),
    rollout.turn_rewards && !begins(rollout).length ? el("p", {class: "small"}, `turns: ${rollout.turn_rewards.map(value => value === null ? "–" : measured(value)).join(" · ")}`) : null, ended);
}

/** Where each of several turns begins among the tokens: what is sampled in one go is one; nothing where they cannot be told apart. */
function begins({logprobs = [], turns = []}) {
  const places = [...logprobs.keys()].filter(place => logprobs[place] !== null && (place === 0 || logprobs[place - 1] === null));
  return places.length > 1 && places.length === turns.length ? places : [];
}

/** The spans, each turn under its number and what it was worth. */
function inTurns(spans, rollout) {
  const places = begins(rollout);
  return spans.flatMap((span, place) => {
    const turn = places.indexOf(place), worth = rollout.turn_rewards?.[turn] ?? null;
    if (turn < 0) return [span];
    return [el("span", {class: "turn"}, `turn ${turn + 1}${worth === null ? "" : ` · reward ${measured(worth)}`}`), span];
  });
}

/** The tokens of a rollout, and a line that says what is under the pointer. */
function tokens(rollout) {
  const texts = rollout.token_texts, readout = el("p", {class: "readout", "aria-live": "polite"});
  if (!texts?.length) return (rollout.turns || [rollout.completion]).map(text => el("div", {class: "tokens"}, text || "(nothing)"));
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

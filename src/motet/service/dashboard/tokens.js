// A rollout token by token: the darker, the less likely the sampler thought it. Hover, or focus and use the arrow keys.
import {el, say} from "./dom.js";

const LEVELS = [0.05, 0.3, 0.8, 1.6, 2.8, 4.5]; // nats; a level each

function level(logprob) {
  return LEVELS.filter(bound => -logprob > bound).length;
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
}

function told(text, logprob) {
  const shown = `“${text.replaceAll("\n", "⏎")}”`;
  if (logprob === null) return `${shown} was read, not sampled`;
  const share = 100 * Math.exp(logprob);
  return `${shown} logprob ${logprob.toFixed(3).replace("-", "−")}, probability ${share >= 99.95 ? "100" : share.toPrecision(2)} %`;
}

/** What the levels mean. */
export function scale() {
  return el("span", {class: "scale"}, "likely", el("span", {"aria-hidden": "true"}, [0, 1, 2, 3, 4, 5, 6].map(place => el("i", {class: `lp${place}`}))), "unlikely");
}

/** The tokens of a rollout, and a line that says what is under the pointer. */
export function tokens(rollout) {
  const texts = rollout.token_texts, readout = el("p", {class: "readout", "aria-live": "polite"});
  if (!texts?.length) return [el("div", {class: "tokens"}, rollout.completion || "(nothing)")];
  const spans = texts.map((text, place) => {
    const logprob = rollout.logprobs[place];
    return el("span", {class: logprob === null ? "read" : `lp${level(logprob)}`, data: {place}}, visible(text));
  });
  let now = null;
  const look = place => {
    now?.classList.remove("now");
    now = place === null ? null : spans[place];
    now?.classList.add("now");
    say(readout, place === null ? "" : told(texts[place], rollout.logprobs[place]));
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
  }, spans);
  return [node, readout];
}

// Rollouts of a job at two steps, side by side.
import {ask, jobPath, rowsOf} from "./api.js";
import {choice, el, fill, say} from "./dom.js";
import {rolloutCard, scale} from "./tokens.js";
import {measured} from "./words.js";

const KINDS = [["eval", "Held-out problems"], ["train", "Training"]];

function options(select, values, chosen) {
  const shown = JSON.stringify(values);
  if (select.dataset.shown !== shown) fill(select, values.map(([value, text]) => el("option", {value: String(value)}, text)));
  select.dataset.shown = shown;
  select.value = String(chosen);
}

function byProblem(list) {
  return new Map(list.map(one => [one.problem, one]));
}

function named(known) {
  return [...known].slice(0, 200).map(([id, one], place) => [id, `${place + 1}. ${String(one.prompt ?? "").replaceAll(/\s+/g, " ").slice(0, 48)}`]);
}

/** One of the two sides: a step, a problem, and its rollouts. */
class Side {
  constructor(name, job, changed) {
    Object.assign(this, {job, step: null, problem: null, texts: new Map(), asked: 0});
    this.steps = el("select", {"aria-label": `${name}: step`, onchange: () => { this.step = Number(this.steps.value); changed(); }});
    this.problems = el("select", {"aria-label": `${name}: problem`, class: "own", onchange: () => { this.problem = Number(this.problems.value); changed(); }});
    this.mean = el("span", {class: "small soft number"});
    this.asked_ = el("p", {class: "asked own"});
    this.list = el("div");
    this.node = el("section", {class: "card", "aria-label": name},
      el("div", {class: "head"}, el("div", {class: "row"}, this.steps, this.problems), this.mean), this.asked_, this.list);
  }

  /** Rollouts of a step without tokens; cached, because they do not change. */
  async index(kind, step) {
    const key = `${kind} ${step}`;
    if (!this.texts.has(key)) this.texts.set(key, await rowsOf(jobPath(this.job, `/rollouts?purpose=${kind}&step=${step}&limit=1000`), 1000));
    return this.texts.get(key);
  }

  /** Choose the problem of this side. Each training step has other problems; evaluations share one choice for both sides. */
  choose(kind, list) {
    this.problems.hidden = this.asked_.hidden = kind === "eval";
    if (kind === "eval") return;
    const known = byProblem(list);
    if (!known.has(this.problem)) this.problem = known.keys().next().value;
    options(this.problems, named(known), this.problem);
    say(this.asked_, String(known.get(this.problem)?.prompt ?? ""));
  }

  async load(kind, problem) {
    const asked = ++this.asked;
    const list = await rowsOf(jobPath(this.job, `/rollouts?purpose=${kind}&step=${this.step}&problem=${problem}&tokens=true&limit=100`), 100);
    if (asked !== this.asked) return;
    const scored = list.map(one => one.reward).filter(Number.isFinite);
    say(this.mean, scored.length ? `mean reward ${measured(scored.reduce((sum, one) => sum + one, 0) / scored.length)}` : "");
    fill(this.list, list.length ? list.map(one => rolloutCard(one)) : el("p", {class: "soft"}, "This problem is not among those of this step."));
  }
}

/** The tab. */
export function rolloutsTab(job) {
  const sides = [new Side("Left", job.id, () => draw()), new Side("Right", job.id, () => draw())];
  const problems = el("select", {id: "problem", onchange: () => { problem = Number(problems.value); draw(); }});
  const asked = el("div", {class: "asked"}), answer = el("p", {class: "small soft"}), status = el("p", {class: "soft", role: "status"});
  const kinds = choice("Which rollouts", KINDS, "eval", value => { kind = value; problem = null; follow(true); });
  const common = el("div", {class: "card"}, asked, answer), both = el("div", {class: "field"}, el("label", {for: "problem"}, "Problem"), problems);
  const body = el("div", {class: "stack"}, common, el("div", {class: "sides"}, sides.map(side => side.node)));
  const node = el("div", {}, el("div", {class: "choose"}, kinds, both, scale()), status, body);
  let kind = "eval", steps = [], stepsOf = "", problem = null, begun = false, working = false;

  function nothing(text) {
    body.hidden = true;
    say(status, text);
  }

  /** Load the list of steps; `anew` sets the sides to the first and the newest step. */
  async function follow(anew) {
    const meant = kind, answer = await ask("GET", jobPath(job.id, `/rollouts?purpose=${kind}&limit=1`)).catch(error => error);
    if (meant !== kind) return; // another kind was chosen meanwhile
    if (answer instanceof Error) {
      if (!begun && kind === "eval" && answer.status === 404) return kinds.choose(kind = "train"), begun = true, follow(true);
      return nothing(answer.status === 404 ? `${answer.message[0].toUpperCase()}${answer.message.slice(1)}: come back when it is.` : answer.message);
    }
    begun = true;
    const second = steps.length === 1 && answer.steps.length > 1; // there is something to compare now
    [steps, stepsOf] = [answer.steps, meant];
    sides[1].node.hidden = steps.length === 1;
    if (!anew && !second && sides.every(side => steps.includes(side.step))) return offer(); // keep what is shown
    if (anew || !steps.includes(sides[0].step)) sides[0].step = steps[0];
    if (anew || second || !steps.includes(sides[1].step)) sides[1].step = steps.at(-1);
    await draw();
  }

  function offer() {
    for (const side of sides) options(side.steps, steps.map(step => [step, `${kind === "eval" ? "version" : "step"} ${step}`]), side.step);
  }

  function chosen() {
    return [kind, problem, ...sides.map(side => [side.step, side.problem])].join();
  }

  async function draw() {
    if (working || stepsOf !== kind) return; // `follow` draws once it knows the steps
    working = true;
    const before = chosen();
    try {
      await drawn();
    } catch (error) {
      nothing(error.message);
    }
    working = false;
    if (before !== chosen()) draw(); // the choice changed meanwhile
  }

  async function drawn() {
    offer();
    const began = kind, lists = await Promise.all(sides.map(side => side.index(kind, side.step)));
    if (kind !== began) return; // another kind was chosen meanwhile
    sides.forEach((side, place) => side.choose(kind, lists[place]));
    for (const shared of [both, common]) shared.hidden = kind !== "eval";
    if (kind === "eval") {
      const known = byProblem(lists.flat());
      if (!known.has(problem)) problem = known.keys().next().value;
      options(problems, named(known), problem);
      say(asked, String(known.get(problem)?.prompt ?? ""));
      say(answer, known.get(problem)?.answer ? `reference: ${known.get(problem).answer}` : "");
    }
    await Promise.all(sides.map(side => side.load(kind, kind === "eval" ? problem : side.problem)));
    body.hidden = false;
    say(status, "");
  }

  return {node, begin: () => follow(!begun), update: () => { if (node.isConnected && !working) follow(false); }, stop() {}};
}

// DOM helpers. Text of jobs, models and people enters the page only here, and only as text nodes.

/** Create an element. Children that are not nodes become text; null, undefined and false are left out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, children);
  return made;
}

/** Append children to an element. */
export function add(parent, ...children) {
  for (const child of children.flat(4)) {
    if (child !== null && child !== undefined && child !== false) parent.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  add(parent, ...children);
}

/** Set an element's text if it differs, so that screen readers announce changes only. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an element's text if it differs; the page that diagnoses name is a link to the service's copy of it. */
export function explain(element, text) {
  if (element.textContent === text) return;
  fill(element, text.split(/(docs\/not-learning\.md#[a-z-]+)/).map((part, place) => place % 2 === 0 ? part
    : el("a", {href: `dashboard/not-learning.html#${part.split("#")[1]}`, target: "_blank", rel: "noopener"}, part)));
}

/** Make these nodes, in this order, the children of an element; nodes that stay are not touched and keep the focus. */
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, place) => {
    if (parent.childNodes[place] !== node) parent.insertBefore(node, parent.childNodes[place] || null);
  });
}

/** A group of buttons, one of which is pressed. Returns the element, with `choose(value)` and `offer(options)`. */
export function choice(label, options, chosen, changed) {
  const group = el("div", {class: "switch", role: "group", "aria-label": label});
  let buttons = [];
  group.choose = value => {
    chosen = value;
    for (const [option, button] of buttons) button.setAttribute("aria-pressed", String(option === value));
  };
  group.offer = next => {
    const known = new Map(buttons);
    buttons = next.map(([value, text, count]) => {
      const button = known.get(value) || el("button", {type: "button", onclick: () => { group.choose(value); changed(value); }});
      if (button.dataset.shown !== `${text} ${count}`) {
        fill(button, text, count === undefined ? null : el("span", {class: "count"}, count));
        button.dataset.shown = `${text} ${count}`;
      }
      return [value, button];
    });
    arrange(group, buttons.map(([, button]) => button));
    group.choose(chosen);
  };
  group.offer(options);
  return group;
}

/** A button that copies the text of an element; if the browser does not allow that, the text stays selected. */
export function copyOf(element, label = "Copy") {
  const button = el("button", {type: "button", "aria-label": label, onclick: async () => {
    const selection = getSelection();
    selection.selectAllChildren(element);
    const copied = await (navigator.clipboard?.writeText(element.textContent) ?? Promise.reject()).then(() => true, () => document.execCommand("copy"));
    if (copied) selection.removeAllRanges();
    say(button, copied ? "Copied" : "Selected: press Ctrl+C");
    setTimeout(() => say(button, "Copy"), 2000);
  }}, "Copy");
  return button;
}

/** Ask for confirmation of something irreversible; resolves to true or false. */
export function sure(title, text, action) {
  return new Promise(resolve => {
    const dialog = el("dialog", {"aria-labelledby": "sure"},
      el("h2", {id: "sure"}, title), el("p", {class: "soft"}, text),
      el("form", {method: "dialog", class: "row"},
        el("button", {value: "no", autofocus: true}, "Keep it"), el("button", {value: "yes", class: "danger"}, action)));
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes"); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

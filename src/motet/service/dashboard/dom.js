// Elements. What jobs, models and people wrote enters the page here and only as text.

/** An element; children that are not nodes become text, those that are null or false are left out. */
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

/** Put children at the end of an element. */
export function add(parent, ...children) {
  for (const child of children.flat(4)) {
    if (child !== null && child !== undefined && child !== false) parent.append(child instanceof Node ? child : String(child));
  }
}

/** Give an element these children instead of those it has. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  add(parent, ...children);
}

/** Set text where it differs, so that screen readers hear only of changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make the children of an element these nodes in this order; nodes that stay are not touched, so focus stays too. */
export function arrange(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, place) => {
    if (parent.childNodes[place] !== node) parent.insertBefore(node, parent.childNodes[place] || null);
  });
}

/** Buttons of which one is pressed. Returns the element, with `choose(value)` and `offer(options)`. */
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

/** A button that copies the text of an element; where pages may not write to the clipboard (http), its text is selected first. */
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

/** Ask before something that cannot be taken back; resolves to whether to do it. */
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

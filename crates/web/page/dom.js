// The only place that makes elements. Texts are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a.name", {href: "#/"}, "text", child): properties that begin with "on" are listeners; null and false are left out.
export function h(what, properties = {}, ...children) {
  return fill(document.createElement(what.split(".")[0]), what, properties, children);
}

export function svg(what, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, what.split(".")[0]), what, properties, children);
}

function fill(element, what, properties, children) {
  const classes = what.split(".").slice(1);
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Sets a text only if it is another one, so that unchanged cells cost no layout.
export function say(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function put(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// Makes the list's children those of `items`, keeping the elements of keys that stay. What stays in its order isn't moved: a moved element loses the focus.
export function keyed(list, items, keyOf, make, update) {
  const keys = items.map((item) => String(keyOf(item)));
  const wanted = new Set(keys);
  const known = new Map();
  for (const child of [...list.children]) {
    if (wanted.has(child.dataset.key)) known.set(child.dataset.key, child);
    else child.remove();
  }
  let at = list.firstElementChild;
  items.forEach((item, i) => {
    let child = known.get(keys[i]);
    if (!child) {
      child = make(item);
      child.dataset.key = keys[i];
    }
    if (child === at) at = at.nextElementSibling;
    else list.insertBefore(child, at);
    update(child, item);
  });
}

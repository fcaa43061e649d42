// Making and updating elements. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An HTML element; attributes that begin with `on` are listeners, `style` is an object. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Set an element's text, only if it differs: a screen reader and the layout stay quiet. */
export function text(element, value) {
  const shown = String(value);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Make `parent`'s children match `items` by `key`: elements are made once, updated in place, removed when their item is gone. */
export function keyed(parent, items, key, make, update) {
  const known = parent.keyed ?? (parent.keyed = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, element] of known) {
    if (wanted.has(name)) continue;
    element.remove();
    known.delete(name);
  }
  items.forEach((item, index) => {
    let element = known.get(key(item));
    if (!element) known.set(key(item), (element = make(item)));
    update(element, item);
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}

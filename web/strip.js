// A strip of blocks, a cell each, with lines of text below it, as a widget of a node.

const MARGIN = 8; // around the element, in the units of the canvas
const STYLE = new URL("specar.css", import.meta.url).href;

export function create(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Puts elements into a node. They are no input: neither a prompt nor a saved workflow mentions them. */
export function addElements(node, name, ...children) {
  const content = create("div", { class: "specar" }, ...children);
  const root = create("div", { "data-specar": name }, create("link", { rel: "stylesheet", href: STYLE }), content);
  const height = () => (content.offsetHeight ? content.offsetHeight + 2 * MARGIN : 0);
  const widget = node.addDOMWidget(name, "specar", root, {
    serialize: false, // in prompts
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: height,
    getMaxHeight: height,
  });
  widget.serialize = false; // in workflows
  // The classic canvas asks for the height when it draws.
  new ResizeObserver(() => node.setDirtyCanvas(true, true)).observe(content);
  // Undo replaces every node by another with the same id, and Nodes 2.0 may go on showing the element of the one before.
  after(node, "onRemoved", () => root.setAttribute("data-removed", ""));
  after(node, "onAdded", () => requestAnimationFrame(() => root.isConnected || stale(node, name)?.replaceWith(root)));
}

const stale = (node, name) =>
  document.querySelector(`[data-node-id="${node.id}"] [data-specar="${name}"][data-removed]`);

/** Fills a strip with cells that have these attributes. Cells stay what they are, so that one keeps the focus. */
export function fill(strip, cells) {
  strip.style.setProperty("--blocks", cells.length);
  while (strip.children.length > cells.length) strip.lastChild.remove();
  while (strip.children.length < cells.length) strip.append(create("span", { "data-block": strip.children.length }));
  cells.forEach((attributes, block) => {
    for (const [name, value] of Object.entries(attributes)) strip.children[block].setAttribute(name, value);
  });
}

/** Calls `then` after whatever the node does already when `event` happens. */
export function after(node, event, then) {
  const before = node[event];
  node[event] = function (...details) {
    const result = before?.apply(this, details);
    then(...details);
    return result;
  };
}

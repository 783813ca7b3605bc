// Elements as a widget of a node: strips of blocks, lines of text, a frame.

import { create } from "./placing.js";

const MARGIN = 8; // around the element, in the units of the canvas
const STYLE = new URL("specar.css", import.meta.url).href;

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

/** Calls `then` after whatever the node does already when `event` happens. */
export function after(node, event, then) {
  const before = node[event];
  node[event] = function (...details) {
    const result = before?.apply(this, details);
    then(...details);
    return result;
  };
}

// Which node made which tokens of an answer, from the request's story.

/**
 * Runs of tokens by one node: `[{start, node, role, attempt}]`, by their first token. The prefill node draws an attempt's first
 * token, the decode node the others.
 */
export function segmentsOf(story) {
  const segments = [];
  let next = 0;
  for (const { event, data } of story.events) {
    if (event === "retry") next = data.tokens_so_far;
    if (!["first_token", "resumed", "handover"].includes(event)) continue;
    const start = event === "handover" ? next + 1 : next;
    while (segments.length && segments.at(-1).start >= start) segments.pop();
    segments.push({ start, node: data.node, role: data.role, attempt: data.attempt });
  }
  return segments;
}

/** The segment of token `index`; undefined if nothing is known of it. */
export const segmentAt = (segments, index) => segments.findLast((segment) => segment.start <= index);

"""What drafts of all methods share: acceptance, the search in texts, costs. What proposes tokens is a `Proposer`
(`common.engine.drafting`), chosen in `common.node.parts`."""

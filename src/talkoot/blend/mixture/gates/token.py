"""Each token by its own state, in every block anew ("DUME", arXiv 2603.29765; Shazeer et al. 2017)."""

from __future__ import annotations

from talkoot.blend.mixture.gates.gate import Gate, gates


class _Token(Gate):
    reads_states = True


gates.register("token")(_Token())

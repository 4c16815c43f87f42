"""One expert for a whole text, chosen by the caller: by a router that reads the prompt, or, as a yardstick, by the
text's true domain."""

from __future__ import annotations

from talkoot.blend.mixture.gates.gate import Gate, gates

gates.register("prompt")(Gate())
gates.register("oracle")(Gate())

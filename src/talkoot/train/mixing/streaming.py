"""Mean progress, a part of the model at a time, behind the next inner steps (Streaming DiLoCo; Douillard et al., 2025).

The update is ``diloco``'s, elementwise. Its defaults make it streaming: the model's layers in ``fragments`` with
rounds that begin at different inner steps, a mean that is merged ``overlap`` inner steps after it was sent, and
``keep`` of the fast weights that survive the merge. As published: outer rate 0.4, Nesterov momentum 0.9, overlap 5,
keep 0.5, fragments of about three layers each; our default of three fragments suits small models. Published messages
are 4-bit floats; here they travel as ``mixing.wire_gradient`` says.
"""

from __future__ import annotations

from talkoot.train.mixing.diloco import MeanProgress
from talkoot.train.mixing.outer import nesterov
from talkoot.train.mixing.rule import mixing_rules

mixing_rules.register("streaming")(
    MeanProgress(nesterov, {"outer_rate": 0.4, "momentum": 0.9, "fragments": 3, "overlap": 5, "keep": 0.5})
)

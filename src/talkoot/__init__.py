"""talkoot: train, repair, post-train, combine, audit and pay for language models on machines nobody owns together."""

__version__ = "0.1.0"

"""A server in OpenAI's protocol over a blend of experts, or over one model."""

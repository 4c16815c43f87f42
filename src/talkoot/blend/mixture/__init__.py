"""One mixture-of-experts model from dense experts, without training: assemble, count, fit, store."""

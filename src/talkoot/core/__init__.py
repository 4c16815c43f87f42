"""Words that every room shares: ids, codec, keys, receipts, the log and its fold. No torch in here."""

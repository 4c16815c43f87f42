"""What every kind of run shares: its folder and lock, the lead's pen, how peers make themselves known, who leads."""

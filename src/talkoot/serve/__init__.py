"""What people see of a run: one view folded from its log, shown as a report (a file) and as a live page."""

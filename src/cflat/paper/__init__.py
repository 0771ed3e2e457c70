"""The paper's tables and figures: what they need, and our numbers beside the published ones."""

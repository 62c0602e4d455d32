"""What things cost, without torch: one file per tensor mode, and what every mode sends, declared from its scheme."""

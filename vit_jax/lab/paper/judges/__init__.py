"""What this scale says of each claim: functions of `seen.Seen` -> (verdict, why)."""

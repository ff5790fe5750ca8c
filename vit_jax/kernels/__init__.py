"""What layers compute, as functions of arrays; what suits one platform is chosen here."""

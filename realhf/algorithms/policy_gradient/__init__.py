"""Policy-gradient algorithms: PPO, GRPO and related ones."""

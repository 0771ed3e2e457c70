"""REINFORCE on CartPole: play once per step, then evaluate the same episodes as often as the optimizer asks.

The episodes are data: actions and returns are fixed before the step, and the closure computes their log-probabilities
anew at the weights that it finds. Playing inside the closure would compare gradients of different data.

python examples/integrations/reinforce.py
"""

import gymnasium
import torch

import cflat

DISCOUNT = 0.99


def play(environment, policy, seed):
    """Return observations, actions and discounted returns of one episode, played with the unperturbed weights."""
    observations, actions, rewards = [], [], []
    observation, _ = environment.reset(seed=seed)
    is_over = False
    while not is_over:
        observations.append(torch.as_tensor(observation))
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=policy(observations[-1])).sample()
        observation, reward, terminated, truncated, _ = environment.step(action.item())
        actions.append(action)
        rewards.append(float(reward))
        is_over = terminated or truncated
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        returns.append(total)
    return torch.stack(observations), torch.stack(actions), torch.tensor(returns[::-1])


def loss_of(policy, episodes):
    observations, actions, returns = (torch.cat(parts) for parts in zip(*episodes, strict=True))
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    return -(torch.distributions.Categorical(logits=policy(observations)).log_prob(actions) * advantages).mean()


def train(optimizer, policy, num_steps, episodes_per_step=4):
    """Return the mean episode length of each step."""
    environment = gymnasium.make("CartPole-v1")
    lengths = []
    for step in range(num_steps):
        seeds = range(step * episodes_per_step, (step + 1) * episodes_per_step)
        episodes = [play(environment, policy, seed) for seed in seeds]

        def closure(episodes=episodes):
            loss = loss_of(policy, episodes)
            loss.backward()
            return loss

        optimizer.step(closure)
        lengths.append(sum(len(returns) for _, _, returns in episodes) / episodes_per_step)
    environment.close()
    return lengths


def make():
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    return policy, cflat.CFlat(torch.optim.Adam(policy.parameters(), lr=2e-2), model=policy, rho=0.05)


if __name__ == "__main__":
    policy, optimizer = make()
    lengths = train(optimizer, policy, num_steps=25)
    print(f"episodes last {sum(lengths[:5]) / 5:.0f} steps at first and {sum(lengths[-5:]) / 5:.0f} at last,", end=" ")
    print(f"{optimizer.telemetry.evaluations_per_step:.0f} evaluations a step for one play")

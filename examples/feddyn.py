"""FedDyn (Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1).

From the round's model x, device k minimises ``L_k(w) - <dual_k, w> + alpha/2 |w - x|^2`` by SGD and then keeps
``dual_k <- dual_k - alpha (w_k - x)``. The server keeps ``h <- h - alpha * share * mean(w_k - x)``, where ``share`` is the
part of all devices that reported, and the next model is ``mean(w_k) - h / alpha``. Duals and h begin with 0.
"""

from edgefl.algorithms import (
    SCALAR,
    Algorithm,
    ConfigError,
    Function,
    Objective,
    Phase,
    Scalars,
    ServerOpt,
    Tensors,
    begun,
    beside,
    evaluate,
    finish,
    gradient,
    held_ports,
    prefixed,
    select,
    state_of,
    step_ports,
)


def feddyn(
    objective: Objective, *, batch: int = 32, steps: int = 10, lr: float = 0.1, alpha: float = 0.1
) -> Algorithm:
    if alpha <= 0:
        raise ConfigError(f"feddyn: alpha is above 0, found {alpha}; take 0.1 or 0.01", alpha=alpha)

    def start(given: Tensors) -> Tensors:
        state = begun(objective, given)
        x = {name: state[f"state.weights.{name}"] for name in objective.trainable}
        return state | prefixed("state.x", x) | prefixed("state.dual", select(given, "carry.dual"))

    def step(given: Tensors) -> Tensors:
        w, x, dual = (select(given, f"state.{part}") for part in ("weights", "x", "dual"))
        loss, correct, grads, moved = gradient(objective, w, given)
        for name, grad in grads.items():
            along = grad - dual[name] + given["hyper.alpha"] * (w[name] - x[name])
            w[name] = w[name] - given["hyper.lr"] * along
        return prefixed("state.weights", w | moved) | {"metric.loss": loss, "metric.correct": correct}

    def end(given: Tensors) -> Tensors:
        w, x, dual = (select(given, f"state.{part}") for part in ("weights", "x", "dual"))
        dual = {name: dual[name] - given["hyper.alpha"] * (w[name] - x[name]) for name in dual}
        return finish(objective)(given) | prefixed("carry.dual", dual)

    def server(before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        scale, h = hyper["alpha"] * hyper["share"], state_of(before, "h")
        h = {name: h[name] - scale * (mean[name] - before[name]) for name in h}
        model = {name: mean[name] - h[name] / hyper["alpha"] for name in h}
        return model | beside("h", h)

    like = {name: objective.weights[name] for name in objective.trainable}
    begins = prefixed("weights", objective.carrier.payload) | prefixed("carry.dual", like)
    ends = prefixed("state.x", like) | prefixed("state.dual", like) | {"hyper.alpha": SCALAR}
    steps_from = step_ports(objective, batch) | ends | {"hyper.lr": SCALAR}
    return Algorithm(
        name="feddyn",
        start=Function("start", start, begins),
        phases=(Phase("train", Function("train", step, steps_from), steps),),
        finish=Function("finish", end, held_ports(objective) | ends),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr, "alpha": alpha},
        server=ServerOpt("feddyn", state={"h": 0.0}, step=server),
    )

"""The front of the compiler: a submodel, its algorithm and the samples' shape in, a bundle out. Reads no configuration.

::

    codec = codecs.build("dense")
    tier = Tier("weak", submodel, coded_algorithm(submodel, "sgd", {"lr": 0.1}, codec))
    order = Order(tier, tier.main, model="resnet8", data=data)
    bundle = compiled(order)
    bundle = cached(BundleCache.of_user(), order).bundle  # once for all
"""

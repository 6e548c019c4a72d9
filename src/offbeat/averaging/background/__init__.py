"""Averages in the background of training: WAGMA-SGD, AD-PSGD and eager-SGD.

The modules, from the papers' protocols to the parts of the strategies:

    group_average       the protocol of WAGMA-SGD: averages in rotating groups
    pair_average        the protocol of AD-PSGD: two ranks at any time
    protocol_member     what both protocols have in common
    rounds              one version of a group average at one member
    deadlines           after which time a rank proceeds without a peer
    interface           the types that protocols take and give
    merge_rules         how an average gets into a model that is being trained
    published_model     the state that the trainer's and the protocol's thread share, and its ports
    gradient_ledger     the same for gradients, for eager-SGD
    progress_thread     the thread that runs a protocol through the generations
    averager            the parts of WAGMA-SGD and AD-PSGD, and what starts all this
    partial_all_reduce  the part of eager-SGD
"""

"""Averages in the background of training: WAGMA-SGD, AD-PSGD and eager-SGD.

The modules, from the papers' protocols to the parts of the strategies:

    group_average       the protocol of WAGMA-SGD: averages in rotating groups
    protocol_member     what both protocols have in common
    rounds              one version of a group average at one member, by either of two ways
    deadlines           after which time a rank proceeds without a peer
    interface           the types that protocols take and give
    merge_rules         how an average gets into a model that is being trained
    shared_model        the model, integer buffers and step of a rank, which three threads share
    progress_thread     runs a protocol through the generations, each of them in a thread of its
                        own
    averager            the callback of WAGMA-SGD and AD-PSGD, and what starts all this

What AD-PSGD and eager-SGD have of their own is in `strategies.adpsgd` and `strategies.eagersgd`.
"""

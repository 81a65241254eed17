r"""First layers cut by columns: what each rank computes of a layer from its columns of the features (P3, Sec. 3.2.2).

A layer that is linear in its rows up to its first weight is a sum over columns: with columns :math:`F_p` on rank *p*,
:math:`\sum_p \mathrm{gather}(X_{F_p}) W_{F_p}^T`, then the rest: bias, norm, further modules. Attention needs scores of
all nodes first, which are such a sum too.

====================  =====================================================  =============================
layer                 gathered columns, and the weight of each               rest
====================  =====================================================  =============================
``GCNConv``           normalised sum: ``lin``                                bias
``SAGEConv``          sum, mean or max: ``lin_l``; own row: ``lin_r``        biases, ``normalize``
``GraphConv``         sum, mean or max: ``lin_rel``; own row: ``lin_root``   biases
``GINConv``           sum, and own row times 1 + eps: ``nn``'s first         ``nn`` from its first bias on
``SGConv``            normalised sums of K hops: ``lin``                     bias
``TAGConv``           own row, and normalised sums of 1 to K hops: a         bias
                      weight for each
``GATConv``           products with ``lin``, averaged by attention;          bias
                      own row: ``res``
``PTAGSConv``         ``transform``, with each of its linear modules cut     ``transform``'s biases, and
                                                                             ``apply_rows``
====================  =====================================================  =============================

Rows of features are read where they lie: sources are global ids. Attention, dropout, messages of a layer's own, and
columns in another type than the weights copy the rows that a batch reads.
"""

from pygdist.hops.cuts.cut import Cut, InEdges, products_of
from pygdist.hops.cuts.trial import cut_of

__all__ = ["Cut", "InEdges", "cut_of", "products_of"]

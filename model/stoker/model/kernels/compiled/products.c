/* Products by what the processor has, alone and with the operations that lie beside them in a decoder's layer.
 *
 * Results are those of the single kernels: they are rounded between two operations, too.
 * T rows, D input size, E output size, F width of the feed-forward part.
 */
#include <stdlib.h>

#include "products.h"
#include "rows.h"

enum kind { NONE, TILES, VECTORS };

int stoker_product_kind(void)
{
#if TILE_PRODUCTS
    return may_use_tiles() ? TILES : NONE;
#elif VECTOR_PRODUCTS
    return VECTORS;
#else
    return NONE;
#endif
}

int stoker_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E)
{
#if TILE_PRODUCTS
    return tile_product(x_TD, weight_ED, bias_E, y_TE, T, D, E);
#elif VECTOR_PRODUCTS
    return vector_product(x_TD, weight_ED, bias_E, y_TE, T, D, E);
#else
    (void)x_TD, (void)weight_ED, (void)bias_E, (void)y_TE, (void)T, (void)D, (void)E;
    return 0;
#endif
}

/* total = x + update and y = norm(total) weight^T (+ bias). update and total NULL: x is the total. */
int stoker_norm_product(const bf16 *x_TD, const bf16 *update_TD, const bf16 *norm_D, float eps, const bf16 *weight_ED,
                        const bf16 *bias_E, bf16 *total_TD, bf16 *y_TE, long T, long D, long E)
{
    bf16 *normed = malloc(T * D * sizeof(bf16));
    if (!normed)
        return 0;
    if (update_TD)
        stoker_add_rms_norm(update_TD, x_TD, norm_D, eps, normed, total_TD, T, D);
    else
        stoker_rms_norm(x_TD, norm_D, eps, normed, T, D);
    int done = stoker_product(normed, weight_ED, bias_E, y_TE, T, D, E);
    free(normed);
    return done;
}

/* The same with SwiGLU at the end: the weight's first F rows are gate, the others up. */
int stoker_norm_product_swiglu(const bf16 *x_TD, const bf16 *update_TD, const bf16 *norm_D, float eps,
                               const bf16 *weight_FD, bf16 *total_TD, bf16 *out_TF, long T, long D, long F)
{
    bf16 *gate_up = malloc(T * 2 * F * sizeof(bf16));
    if (!gate_up)
        return 0;
    int done = stoker_norm_product(x_TD, update_TD, norm_D, eps, weight_FD, 0, total_TD, gate_up, T, D, 2 * F);
    if (done)
        stoker_swiglu(gate_up, out_TF, T, F);
    free(gate_up);
    return done;
}

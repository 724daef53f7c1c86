/* All blocks of a dense decoder for one pass, in one call: a caller in Python needs as long for the calls of one row as
 * the products do.
 *
 * Each operation is the one that the caller would call by itself, so the bits are the same.
 * T tokens, D hidden, N heads, K kv heads, H head_dim, F width.
 */
#include <stdlib.h>

#include "products.h"
#include "rows.h"

struct block {
    const bf16 *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *mlp_norm, *gate_up, *down;
    long window;
};

struct blocks {
    const struct block *each;
    long count, D, N, K, H, F;
    float eps, scale;
};

/* Sequences of about the same length; lengths and rows as in stoker_attend, rows of all layers. */
struct group {
    const int64_t *token_rows, *block_rows, *lengths;
    long num_sequences, num_blocks;
};

/* New tokens [first, first + num_queries) of the pass, the last of num_keys of one sequence. */
struct prompt {
    const int64_t *block_rows;
    long first, num_queries, num_keys, num_blocks;
};

struct pass {
    const bf16 *x, *update; /* update NULL: x is the whole stream */
    bf16 *out_x, *out_update, *cache;
    const float *cos, *sin;
    const int64_t *slot_rows; /* [layers, 2 * T] */
    const struct group *groups;
    const struct prompt *prompts;
    long table_stride, T, num_groups, num_prompts, block_size;
};

/* Results between the operations of one block. */
struct scratch {
    bf16 *total, *update, *qkv, *q, *attended, *activated;
};

static void attend(const struct blocks *blocks, const struct block *block, const struct pass *pass, long layer,
                   const struct scratch *s)
{
    long T = pass->T, N = blocks->N, K = blocks->K, H = blocks->H;
    stoker_rotate_and_write(s->qkv, s->qkv + N * H, s->qkv + (N + K) * H, (N + 2 * K) * H, pass->cos, pass->sin,
                            pass->table_stride, block->q_norm, block->k_norm, blocks->eps, s->q, pass->cache,
                            pass->slot_rows + layer * 2 * T, T, N, K, H);
    for (long g = 0; g < pass->num_groups; g++) {
        const struct group *group = pass->groups + g;
        long S = group->num_sequences, B = group->num_blocks;
        stoker_attend(s->q, s->attended, pass->cache, group->token_rows, group->block_rows + layer * 2 * S * B,
                      group->lengths, S, B, pass->block_size, N, K, H, blocks->scale, block->window);
    }
    for (long p = 0; p < pass->num_prompts; p++) {
        const struct prompt *prompt = pass->prompts + p;
        long row = prompt->first * N * H, B = prompt->num_blocks;
        stoker_attend_prompt(s->q + row, s->attended + row, pass->cache, prompt->block_rows + layer * 2 * B,
                             prompt->num_queries, prompt->num_keys, B, pass->block_size, N, K, H, blocks->scale,
                             block->window);
    }
}

static int compute(const struct blocks *blocks, const struct pass *pass, const struct scratch *s)
{
    const bf16 *x = pass->x, *update = pass->update;
    long T = pass->T, D = blocks->D, N = blocks->N, K = blocks->K, H = blocks->H, F = blocks->F, done = 1;
    for (long layer = 0; layer < blocks->count && done; layer++) {
        const struct block *block = blocks->each + layer;
        done = stoker_norm_product(x, update, block->attention_norm, blocks->eps, block->qkv, block->qkv_bias,
                                   s->total, s->qkv, T, D, (N + 2 * K) * H);
        x = update ? s->total : x;
        if (done)
            attend(blocks, block, pass, layer, s);
        done = done && stoker_product(s->attended, block->output, block->output_bias, s->update, T, N * H, D) &&
               stoker_norm_product_swiglu(x, s->update, block->mlp_norm, blocks->eps, block->gate_up, pass->out_x,
                                          s->activated, T, D, F) &&
               stoker_product(s->activated, block->down, 0, pass->out_update, T, F, D);
        x = pass->out_x, update = pass->out_update;
    }
    return done;
}

/* Returns 0 without memory. */
int stoker_blocks(const struct blocks *blocks, const struct pass *pass)
{
    long T = pass->T, D = T * blocks->D, q = T * blocks->N * blocks->H, qkv = q + 2 * T * blocks->K * blocks->H;
    bf16 *memory = malloc((2 * D + qkv + 2 * q + T * blocks->F) * sizeof(bf16));
    if (!memory)
        return 0;
    struct scratch s = {.total = memory, .update = memory + D, .qkv = memory + 2 * D};
    s.q = s.qkv + qkv, s.attended = s.q + q, s.activated = s.attended + q;
    int done = compute(blocks, pass, &s);
    free(memory);
    return done;
}

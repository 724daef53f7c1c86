/* What lies between the products of a bfloat16 decoder on a CPU, each in one pass over its rows.
 *
 * Plain C: the compiler makes vector code for the machine. Numbers are bfloat16 in memory and float in registers; they
 * are rounded where the reference kernels round. Tensors are contiguous unless a stride (in elements) is given.
 *
 * T rows or tokens, D hidden, F width, N heads, K kv heads, G = N / K, H head_dim, S sequences, L keys.
 */
#include <math.h>
#include <stdint.h>

#include "rows.h"

#define SERIAL_WORK 65536 /* multiplications that take less time than waking the other threads */
#define KEY_TILE 64
#define MAX_GROUP 8 /* heads that share one walk over the keys */
#define MAX_HEAD 256

/* e^x within 2 units of the last place: 2^n times a polynomial on [-ln(2)/2, ln(2)/2]. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r + 1.0f);
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

static inline void norm_row(const bf16 *x, const bf16 *weight, float eps, bf16 *out, long D)
{
    float squares = 0;
    for (long d = 0; d < D; d++)
        squares += wide(x[d]) * wide(x[d]);
    float scale = 1.0f / sqrtf(squares / D + eps);
    for (long d = 0; d < D; d++)
        out[d] = narrow(wide(x[d]) * scale * wide(weight[d]));
}

void stoker_rms_norm(const bf16 *x_TD, const bf16 *weight_D, float eps, bf16 *out_TD, long T, long D)
{
#pragma omp parallel for if (T > 1 && T * D > SERIAL_WORK)
    for (long t = 0; t < T; t++)
        norm_row(x_TD + t * D, weight_D, eps, out_TD + t * D, D);
}

void stoker_add_rms_norm(const bf16 *x_TD, const bf16 *residual_TD, const bf16 *weight_D, float eps, bf16 *out_TD,
                         bf16 *total_TD, long T, long D)
{
#pragma omp parallel for if (T > 1 && T * D > SERIAL_WORK)
    for (long t = 0; t < T; t++) {
        const bf16 *x = x_TD + t * D, *residual = residual_TD + t * D;
        bf16 *restrict total = total_TD + t * D;
        for (long d = 0; d < D; d++)
            total[d] = narrow(wide(x[d]) + wide(residual[d]));
        norm_row(total, weight_D, eps, out_TD + t * D, D);
    }
}

/* silu(gate) * up; a row holds gate, then up. */
void stoker_swiglu(const bf16 *gate_up, bf16 *out_TF, long T, long F)
{
#pragma omp parallel for if (T > 1 && T * F > SERIAL_WORK / 4)
    for (long t = 0; t < T; t++) {
        const bf16 *gate = gate_up + t * 2 * F, *up = gate + F;
        bf16 *restrict out = out_TF + t * F;
        for (long f = 0; f < F; f++) {
            float g = wide(gate[f]);
            out[f] = narrow(wide(narrow(g / (1.0f + exponential(-g)))) * wide(up[f]));
        }
    }
}

/* Norm over the head where there is a weight, then rotate pairs of elements h and h + H/2. */
static void rotate_head(const bf16 *x, const float *cos, const float *sin, const bf16 *norm, float eps, bf16 *out,
                        long H)
{
    bf16 normed[MAX_HEAD];
    long half = H / 2;
    if (norm) {
        norm_row(x, norm, eps, normed, H);
        x = normed;
    }
    for (long h = 0; h < half; h++)
        out[h] = narrow(fmaf(wide(x[h + half]), sin[h], wide(x[h]) * cos[h]));
    for (long h = half; h < H; h++)
        out[h] = narrow(fmaf(wide(x[h - half]), sin[h], wide(x[h]) * cos[h]));
}

/* Rotate q into a tensor of its own, and k into the cache beside v. rows: [2 * T] rows of the cache seen as
 * [rows, K, H], of the keys, then of the values. */
void stoker_rotate_and_write(const bf16 *q, const bf16 *k, const bf16 *v, long token_stride, const float *cos,
                             const float *sin, long table_stride, const bf16 *q_norm, const bf16 *k_norm, float eps,
                             bf16 *out_TNH, bf16 *cache, const int64_t *rows, long T, long N, long K, long H)
{
#pragma omp parallel for if (T > 1 && T * (N + K) * H > SERIAL_WORK)
    for (long t = 0; t < T; t++) {
        const float *c = cos + t * table_stride, *s = sin + t * table_stride;
        const bf16 *values = v + t * token_stride;
        bf16 *key = cache + rows[t] * K * H, *restrict value = cache + rows[T + t] * K * H;
        for (long n = 0; n < N; n++)
            rotate_head(q + t * token_stride + n * H, c, s, q_norm, eps, out_TNH + (t * N + n) * H, H);
        for (long n = 0; n < K; n++)
            rotate_head(k + t * token_stride + n * H, c, s, k_norm, eps, key + n * H, H);
        for (long h = 0; h < K * H; h++)
            value[h] = values[h];
    }
}

/* One sequence's keys and values of one kv head, in blocks of the cache. */
struct Walk {
    const bf16 *cache;
    const int64_t *key_blocks, *value_blocks;
    long block_size, token_stride, first, last; /* keys [first, last) are seen */
};

static inline const bf16 *place(const struct Walk *walk, const int64_t *blocks, long position)
{
    long block = position / walk->block_size, offset = position % walk->block_size;
    return walk->cache + (blocks[block] * walk->block_size + offset) * walk->token_stride;
}

/* Attention of `heads` queries over the keys of one kv head, in tiles with a running maximum and sum. */
static inline __attribute__((always_inline)) void attend_heads(const bf16 *q, bf16 *out, const struct Walk *walk,
                                                               long heads, long H, float scale)
{
    float queries[MAX_GROUP][MAX_HEAD], sums[MAX_GROUP][MAX_HEAD], scores[MAX_GROUP][KEY_TILE], row[MAX_HEAD];
    float most[MAX_GROUP], total[MAX_GROUP];
    for (long g = 0; g < heads; g++) {
        most[g] = -INFINITY, total[g] = 0;
        for (long h = 0; h < H; h++)
            queries[g][h] = wide(q[g * H + h]) * scale, sums[g][h] = 0;
    }
    for (long begin = walk->first; begin < walk->last; begin += KEY_TILE) {
        long tile = walk->last - begin < KEY_TILE ? walk->last - begin : KEY_TILE;
        for (long j = 0; j < tile; j++) {
            const bf16 *key = place(walk, walk->key_blocks, begin + j);
            for (long h = 0; h < H; h++)
                row[h] = wide(key[h]);
            for (long g = 0; g < heads; g++) {
                float score = 0;
                for (long h = 0; h < H; h++)
                    score += queries[g][h] * row[h];
                scores[g][j] = score;
            }
        }
        for (long g = 0; g < heads; g++) {
            float highest = most[g], sum = 0;
            for (long j = 0; j < tile; j++)
                highest = scores[g][j] > highest ? scores[g][j] : highest;
            float shrink = most[g] == -INFINITY ? 0 : exponential(most[g] - highest);
            for (long j = 0; j < tile; j++) {
                scores[g][j] = exponential(scores[g][j] - highest);
                sum += scores[g][j];
            }
            most[g] = highest, total[g] = total[g] * shrink + sum;
            for (long h = 0; h < H; h++)
                sums[g][h] *= shrink;
        }
        for (long j = 0; j < tile; j++) {
            const bf16 *value = place(walk, walk->value_blocks, begin + j);
            for (long h = 0; h < H; h++)
                row[h] = wide(value[h]);
            for (long g = 0; g < heads; g++)
                for (long h = 0; h < H; h++)
                    sums[g][h] += scores[g][j] * row[h];
        }
    }
    for (long g = 0; g < heads; g++)
        for (long h = 0; h < H; h++)
            out[g * H + h] = narrow(sums[g][h] / total[g]);
}

/* One new token per sequence, whose heads are the queries. token_rows: [S] rows of q and out, or NULL: in order.
 * blocks: [2 * S * B], of the keys, then of the values; a row of the cache is [block_size, K, H].
 * window: keys that a query sees, itself included; 0: all before it. */
void stoker_attend(const bf16 *q_TNH, bf16 *out_TNH, const bf16 *cache, const int64_t *token_rows,
                   const int64_t *blocks, const int64_t *lengths, long S, long B, long block_size, long N, long K,
                   long H, float scale, long window)
{
    long G = N / K, work = 0;
    for (long s = 0; s < S; s++)
        work += lengths[s] * N * H * 2;
#pragma omp parallel for collapse(2) schedule(dynamic) if (S * K > 1 && work > 4 * SERIAL_WORK)
    for (long s = 0; s < S; s++)
        for (long k = 0; k < K; k++) {
            long token = token_rows ? token_rows[s] : s;
            long first = window && lengths[s] > window ? lengths[s] - window : 0;
            struct Walk walk = {cache + k * H,          blocks + s * B, blocks + (S + s) * B, block_size, K * H,
                                first, lengths[s]};
            for (long g = 0; g < G; g += MAX_GROUP) {
                long at = (token * N + k * G + g) * H, heads = G - g < MAX_GROUP ? G - g : MAX_GROUP;
                if (H == 64 && heads == 3)
                    attend_heads(q_TNH + at, out_TNH + at, &walk, 3, 64, scale);
                else if (H == 64)
                    attend_heads(q_TNH + at, out_TNH + at, &walk, heads, 64, scale);
                else if (H == 128)
                    attend_heads(q_TNH + at, out_TNH + at, &walk, heads, 128, scale);
                else
                    attend_heads(q_TNH + at, out_TNH + at, &walk, heads, H, scale);
            }
        }
}

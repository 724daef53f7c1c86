/* Attention of a prompt's piece over the cache, on processors with AVX2 and FMA but without AVX-512, where torch has no
 * fast products in bfloat16.
 *
 * The contract of a row (one query of one head): keys come in tiles of 64 that begin at multiples of 64. A score is one
 * float chain of fused multiply-adds over the head, in rising order; a tile's weights are exponentials of scores less
 * the highest so far, their sum is made in eight lanes; the values are added in one chain, key by key. Hidden keys weigh
 * zero, so a row's bits depend neither on the other rows of the piece, nor on where a prompt is cut, nor on the threads.
 *
 * T queries, L keys, N heads, K kv heads, G = N / K, H head_dim (a multiple of 16), R rows that are computed together.
 */
#include "products.h"
#include "rows.h"

#if VECTOR_PRODUCTS
#include <immintrin.h>
#include <math.h>

#define KEY_TILE 64
#define LANES 8
#define MOST_ROWS 48 /* queries times heads that share a tile of keys */
#define MAX_HEAD 256
#define SERIAL_WORK 262144

/* One kv head of one sequence in the cache. */
struct keys {
    const bf16 *cache;
    const int64_t *key_blocks, *value_blocks;
    long block_size, token_stride, H;
};

/* Rows of queries [first, first + queries) of some heads, and what is known of them so far. */
struct piece {
    float queries[MOST_ROWS * MAX_HEAD], sums[MOST_ROWS * MAX_HEAD];
    float keys[MAX_HEAD * KEY_TILE], values[KEY_TILE * MAX_HEAD];
    float weights[MOST_ROWS * KEY_TILE]; /* first the scores */
    float most[MOST_ROWS], total[MOST_ROWS], shrink[MOST_ROWS];
    long begins[MOST_ROWS], ends[MOST_ROWS]; /* keys that a row sees */
    long rows;
};

static inline const bf16 *place(const struct keys *keys, const int64_t *blocks, long position)
{
    long block = position / keys->block_size, offset = position % keys->block_size;
    return keys->cache + (blocks[block] * keys->block_size + offset) * keys->token_stride;
}

/* e^x, the same polynomial as in rows.c. */
static inline __m256 exponentials(__m256 x)
{
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), x); /* NaN stays */
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

/* 8 x 8 numbers of 32 bits: rows become columns. */
static inline __attribute__((always_inline)) void transpose(__m256i x[8])
{
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        x[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
}

/* keys[h * KEY_TILE + j] of `used` keys from `begin` on; columns behind them repeat the last, up to 16 in all. */
static void read_keys(const struct keys *from, long begin, long used, float *keys)
{
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
    for (long j = 0; j < (used + 15) / 16 * 16; j += LANES) {
        const bf16 *rows[LANES];
        for (long i = 0; i < LANES; i++)
            rows[i] = place(from, from->key_blocks, begin + (j + i < used ? j + i : used - 1));
        for (long h = 0; h < from->H; h += 16) {
            __m256i pairs[LANES];
            for (long i = 0; i < LANES; i++)
                pairs[i] = _mm256_loadu_si256((const __m256i *)(rows[i] + h));
            transpose(pairs);
            for (long i = 0; i < LANES; i++) {
                float *to = keys + (h + 2 * i) * KEY_TILE + j;
                _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(pairs[i], 16)));
                _mm256_storeu_ps(to + KEY_TILE, _mm256_castsi256_ps(_mm256_and_si256(pairs[i], odd)));
            }
        }
    }
}

static void read_values(const struct keys *from, long begin, long used, float *values)
{
    for (long j = 0; j < used; j++) {
        const bf16 *row = place(from, from->value_blocks, begin + j);
        for (long h = 0; h < from->H; h++)
            values[j * from->H + h] = wide(row[h]);
    }
}

/* Scores of R rows with 16 keys. */
static inline __attribute__((always_inline)) void score_rows(const float *queries, const float *keys, float *scores,
                                                             long H, int R)
{
    __m256 sum[12];
    for (int i = 0; i < 2 * R; i++)
        sum[i] = _mm256_setzero_ps();
    for (long h = 0; h < H; h++) {
        __m256 low = _mm256_loadu_ps(keys + h * KEY_TILE), high = _mm256_loadu_ps(keys + h * KEY_TILE + LANES);
        for (int r = 0; r < R; r++) {
            __m256 query = _mm256_broadcast_ss(queries + r * H + h);
            sum[2 * r] = _mm256_fmadd_ps(query, low, sum[2 * r]);
            sum[2 * r + 1] = _mm256_fmadd_ps(query, high, sum[2 * r + 1]);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(scores + r * KEY_TILE, sum[2 * r]);
        _mm256_storeu_ps(scores + r * KEY_TILE + LANES, sum[2 * r + 1]);
    }
}

/* Shrink R rows' 16 sums and add the values of `used` keys. */
static inline __attribute__((always_inline)) void add_values(const float *weights, const float *values,
                                                             const float *shrink, float *sums, long used, long H, int R)
{
    __m256 sum[12];
    for (int r = 0; r < R; r++) {
        __m256 by = _mm256_broadcast_ss(shrink + r);
        sum[2 * r] = _mm256_mul_ps(_mm256_loadu_ps(sums + r * H), by);
        sum[2 * r + 1] = _mm256_mul_ps(_mm256_loadu_ps(sums + r * H + LANES), by);
    }
    for (long j = 0; j < used; j++) {
        __m256 low = _mm256_loadu_ps(values + j * H), high = _mm256_loadu_ps(values + j * H + LANES);
        for (int r = 0; r < R; r++) {
            __m256 weight = _mm256_broadcast_ss(weights + r * KEY_TILE + j);
            sum[2 * r] = _mm256_fmadd_ps(weight, low, sum[2 * r]);
            sum[2 * r + 1] = _mm256_fmadd_ps(weight, high, sum[2 * r + 1]);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(sums + r * H, sum[2 * r]);
        _mm256_storeu_ps(sums + r * H + LANES, sum[2 * r + 1]);
    }
}

static inline __attribute__((always_inline)) void scores_of(struct piece *piece, long row, long used, long H, int R)
{
    for (long j = 0; j < used; j += 2 * LANES)
        score_rows(piece->queries + row * H, piece->keys + j, piece->weights + row * KEY_TILE + j, H, R);
}

static inline __attribute__((always_inline)) void values_of(struct piece *piece, long row, long used, long H, int R)
{
    for (long h = 0; h < H; h += 2 * LANES)
        add_values(piece->weights + row * KEY_TILE, piece->values + h, piece->shrink + row, piece->sums + row * H + h,
                   used, H, R);
}

static float lanes_sum(__m256 x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Turn a row's scores of the tile at `begin` into weights, zero for keys that it does not see. */
static void weigh(struct piece *piece, long row, long begin)
{
    float *weights = piece->weights + row * KEY_TILE, before = piece->most[row], highest = before;
    long from = piece->begins[row] - begin, to = piece->ends[row] - begin;
    from = from < 0 ? 0 : from, to = to > KEY_TILE ? KEY_TILE : to;
    piece->shrink[row] = 1;
    for (long j = 0; j < KEY_TILE; j++)
        weights[j] = j >= from && j < to ? weights[j] : -INFINITY;
    for (long j = 0; j < KEY_TILE; j++)
        highest = weights[j] > highest ? weights[j] : highest;
    __m256 sum = _mm256_setzero_ps(), hidden = _mm256_set1_ps(-INFINITY);
    for (long j = 0; j < KEY_TILE; j += LANES) {
        __m256 score = _mm256_loadu_ps(weights + j);
        __m256 weight = exponentials(_mm256_sub_ps(score, _mm256_set1_ps(highest)));
        weight = _mm256_andnot_ps(_mm256_cmp_ps(score, hidden, _CMP_EQ_OQ), weight);
        _mm256_storeu_ps(weights + j, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    if (from >= to)
        return;
    if (before == -INFINITY)
        piece->shrink[row] = 0;
    else
        piece->shrink[row] = _mm256_cvtss_f32(exponentials(_mm256_set1_ps(before - highest)));
    piece->most[row] = highest;
    piece->total[row] = fmaf(piece->total[row], piece->shrink[row], lanes_sum(sum));
}

static void add_tile(struct piece *piece, const struct keys *from, long begin, long end)
{
    long used = end - begin < KEY_TILE ? end - begin : KEY_TILE, H = from->H, row = 0;
    read_keys(from, begin, used, piece->keys);
    read_values(from, begin, used, piece->values);
    for (; row + 6 <= piece->rows; row += 6)
        scores_of(piece, row, used, H, 6);
    for (; row + 3 <= piece->rows; row += 3)
        scores_of(piece, row, used, H, 3);
    for (; row < piece->rows; row++)
        scores_of(piece, row, used, H, 1);
    for (row = 0; row < piece->rows; row++)
        weigh(piece, row, begin);
    for (row = 0; row + 6 <= piece->rows; row += 6)
        values_of(piece, row, used, H, 6);
    for (; row + 3 <= piece->rows; row += 3)
        values_of(piece, row, used, H, 3);
    for (; row < piece->rows; row++)
        values_of(piece, row, used, H, 1);
}

/* Attend for `queries` neighbouring queries of `heads` heads; `position` is the first one's. */
static void attend_piece(const bf16 *q, bf16 *out, const struct keys *from, long position, long queries, long heads,
                         long token_stride, float scale, long window)
{
    struct piece piece;
    long H = from->H, end = position + queries, begin = window && position >= window ? position + 1 - window : 0;
    piece.rows = queries * heads;
    for (long row = 0; row < piece.rows; row++) {
        const bf16 *query = q + row / heads * token_stride + row % heads * H;
        long last = position + row / heads + 1;
        piece.most[row] = -INFINITY, piece.total[row] = 0;
        piece.begins[row] = window && last > window ? last - window : 0, piece.ends[row] = last;
        for (long h = 0; h < H; h++)
            piece.queries[row * H + h] = wide(query[h]) * scale, piece.sums[row * H + h] = 0;
    }
    for (long tile = begin / KEY_TILE * KEY_TILE; tile < end; tile += KEY_TILE)
        add_tile(&piece, from, tile, end);
    for (long row = 0; row < piece.rows; row++)
        for (long h = 0; h < H; h++)
            out[row / heads * token_stride + row % heads * H + h] = narrow(piece.sums[row * H + h] / piece.total[row]);
}
#endif

/* T queries, the last positions of L keys; blocks: [2 * B], of the keys, then of the values, as in stoker_attend. */
void stoker_attend_prompt(const bf16 *q_TNH, bf16 *out_TNH, const bf16 *cache, const int64_t *blocks, long T, long L,
                          long B, long block_size, long N, long K, long H, float scale, long window)
{
#if VECTOR_PRODUCTS
    long G = N / K, heads = G < MOST_ROWS ? G : MOST_ROWS, queries = MOST_ROWS / heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (T * L * N * H > SERIAL_WORK)
    for (long t = 0; t < T; t += queries)
        for (long k = 0; k < K; k++) {
            struct keys keys = {cache + k * H, blocks, blocks + B, block_size, K * H, H};
            long count = T - t < queries ? T - t : queries;
            for (long g = 0; g < G; g += heads) {
                long at = (t * N + k * G + g) * H, used = G - g < heads ? G - g : heads;
                attend_piece(q_TNH + at, out_TNH + at, &keys, L - T + t, count, used, N * H, scale, window);
            }
        }
#else
    (void)q_TNH, (void)out_TNH, (void)cache, (void)blocks, (void)T, (void)L, (void)B, (void)block_size, (void)N;
    (void)K, (void)H, (void)scale, (void)window;
#endif
}

/* What one core could do: PPO on CartPole-v1 by hand, in one thread, with nothing but loops that a compiler can vectorise.
 *
 *   cc -O3 -march=native -ffast-math limit.c -lm -o limit
 *   ./limit ENVS ROLLOUT_STEPS MINIBATCH EPOCHS LEARNING_RATE GAMMA LAMBDA ENTROPY TOTAL_STEPS SEED
 *
 * The work is the benchmarks' own: CartPole in double, 64x64 tanh actor and critic in float with orthogonal weights, truncation
 * that keeps the successor's value, GAE, shuffled minibatches with normalised advantages, the clipped loss with its gradient,
 * a bound on the gradient's norm, Adam. Prints one line of JSON.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OBS = 4, HIDDEN = 64, ACTIONS = 2, ROWS = 4, RECENT = 100, LIMIT = 500 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *floats(size_t count) { /* zeroed, aligned, with room for whole blocks of rows */
    size_t bytes = ((count + ROWS * HIDDEN) * sizeof(float) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes);
    if (!memory) exit(1);
    return memset(memory, 0, bytes);
}

/* ---- random numbers: xorshift64* ---- */

static uint64_t random_state;
static uint64_t random_bits(void) {
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}
static double uniform(void) { return (random_bits() >> 11) * 0x1p-53; }
static double gaussian(void) { return sqrt(-2 * log(1 - uniform())) * cos(2 * M_PI * uniform()); }

/* ---- the world ---- */

typedef struct { double x, v, angle, spin; int length; } Pole;

static void reset(Pole *p) {
    p->x = uniform() * 0.1 - 0.05, p->v = uniform() * 0.1 - 0.05;
    p->angle = uniform() * 0.1 - 0.05, p->spin = uniform() * 0.1 - 0.05, p->length = 0;
}

static int step(Pole *p, int right) { /* returns whether it fell */
    double force = right ? 10.0 : -10.0, c = cos(p->angle), s = sin(p->angle);
    double push = (force + 0.05 * p->spin * p->spin * s) / 1.1;
    double turn = (9.8 * s - c * push) / (0.5 * (4.0 / 3.0 - 0.1 * c * c / 1.1));
    double pull = push - 0.05 * turn * c / 1.1;
    p->x += 0.02 * p->v, p->v += 0.02 * pull, p->angle += 0.02 * p->spin, p->spin += 0.02 * turn, p->length++;
    return fabs(p->x) > 2.4 || fabs(p->angle) > 12 * 2 * M_PI / 360;
}

static void look(const Pole *p, float *row) { row[0] = p->x, row[1] = p->v, row[2] = p->angle, row[3] = p->spin; }

/* ---- matrices: [n, from] times [from, HIDDEN], four rows at a time so that each weight is loaded once for four ---- */

static inline void times(int n, int from, const float *restrict x, const float *restrict w, const float *restrict bias, float *restrict y) {
    for (int r = 0; r < n; r += ROWS) {
        float sum[ROWS][HIDDEN];
        for (int k = 0; k < ROWS; k++)
            for (int j = 0; j < HIDDEN; j++) sum[k][j] = bias ? bias[j] : 0.0f;
        for (int i = 0; i < from; i++)
            for (int k = 0; k < ROWS; k++)
                for (int j = 0; j < HIDDEN; j++) sum[k][j] += x[(r + k) * from + i] * w[i * HIDDEN + j];
        memcpy(y + r * HIDDEN, sum, sizeof sum);
    }
}

/* The transposed product for gradients of weights: [n, from]ᵀ times [n, HIDDEN], four columns of x at a time. */
static inline void outer(int n, int from, const float *restrict x, const float *restrict dy, float *restrict dw) {
    for (int i = 0; i < from; i += ROWS) {
        float sum[ROWS][HIDDEN] = {{0}};
        for (int r = 0; r < n; r++)
            for (int k = 0; k < ROWS; k++)
                for (int j = 0; j < HIDDEN; j++) sum[k][j] += x[r * from + i + k] * dy[r * HIDDEN + j];
        memcpy(dw + i * HIDDEN, sum, sizeof sum);
    }
}

static void squash(int n, float *restrict y) {
    for (int i = 0; i < n * HIDDEN; i++) y[i] = tanhf(y[i]);
}

/* ---- networks: all parameters of both in one array, so that the norm and Adam are single loops ---- */

typedef struct { float *w1, *b1, *w2, *b2, *w3, *b3; int out; } Net;      /* w3 is [out, HIDDEN] */
typedef struct { float *h1, *h2, *d1, *d2, *turned; } Room;              /* activations, their gradients, w2 transposed */

static int net_size(int out) { return OBS * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN + out * HIDDEN + ROWS; }

static Net net_at(float *p, int out) {
    Net net = {.out = out};
    net.w1 = p, net.b1 = net.w1 + OBS * HIDDEN, net.w2 = net.b1 + HIDDEN, net.b2 = net.w2 + HIDDEN * HIDDEN;
    net.w3 = net.b2 + HIDDEN, net.b3 = net.w3 + out * HIDDEN;
    return net;
}

static void orthogonal(float *w, int rows, int columns, double gain) { /* rows <= columns: rows become orthonormal, times gain */
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) w[i * columns + j] = gaussian();
        for (int k = 0; k < i; k++) {
            double dot = 0;
            for (int j = 0; j < columns; j++) dot += w[i * columns + j] * w[k * columns + j];
            for (int j = 0; j < columns; j++) w[i * columns + j] -= dot * w[k * columns + j];
        }
        double norm = 0;
        for (int j = 0; j < columns; j++) norm += w[i * columns + j] * w[i * columns + j];
        for (int j = 0; j < columns; j++) w[i * columns + j] /= sqrt(norm);
    }
    for (int i = 0; i < rows * columns; i++) w[i] *= gain;
}

static void forward(const Net *net, int n, const float *x, Room *room, float *out) { /* out [n, net->out] */
    times(n, OBS, x, net->w1, net->b1, room->h1), squash(n, room->h1);
    times(n, HIDDEN, room->h1, net->w2, net->b2, room->h2), squash(n, room->h2);
    for (int r = 0; r < n; r++)
        for (int o = 0; o < net->out; o++) {
            float sum = net->b3[o];
            for (int j = 0; j < HIDDEN; j++) sum += room->h2[r * HIDDEN + j] * net->w3[o * HIDDEN + j];
            out[r * net->out + o] = sum;
        }
}

static void bias_gradient(int n, const float *restrict d, float *restrict db) {
    float sum[HIDDEN] = {0};
    for (int r = 0; r < n; r++)
        for (int j = 0; j < HIDDEN; j++) sum[j] += d[r * HIDDEN + j];
    memcpy(db, sum, sizeof sum);
}

static void unsquash(int n, const float *restrict h, float *restrict d) { /* tanh' = 1 - tanh² */
    for (int i = 0; i < n * HIDDEN; i++) d[i] *= 1 - h[i] * h[i];
}

static void backward(const Net *net, const Net *grad, int n, const float *x, Room *room, const float *dout) {
    memset(grad->w3, 0, (net->out * HIDDEN + net->out) * sizeof(float));
    for (int r = 0; r < n; r++) {
        float *d = room->d2 + r * HIDDEN, *h = room->h2 + r * HIDDEN;
        memset(d, 0, HIDDEN * sizeof(float));
        for (int o = 0; o < net->out; o++) {
            float g = dout[r * net->out + o];
            grad->b3[o] += g;
            for (int j = 0; j < HIDDEN; j++) d[j] += g * net->w3[o * HIDDEN + j], grad->w3[o * HIDDEN + j] += g * h[j];
        }
    }
    unsquash(n, room->h2, room->d2);
    outer(n, HIDDEN, room->h1, room->d2, grad->w2), bias_gradient(n, room->d2, grad->b2);
    for (int i = 0; i < HIDDEN; i++)
        for (int j = 0; j < HIDDEN; j++) room->turned[j * HIDDEN + i] = net->w2[i * HIDDEN + j];
    times(n, HIDDEN, room->d2, room->turned, NULL, room->d1);
    unsquash(n, room->h1, room->d1);
    outer(n, OBS, x, room->d1, grad->w1), bias_gradient(n, room->d1, grad->b1);
}

/* ---- the program ---- */

int main(int argc, char **argv) {
    if (argc != 11) return fprintf(stderr, "usage: see the first lines of limit.c\n"), 2;
    const int B = atoi(argv[1]), T = atoi(argv[2]), minibatch = atoi(argv[3]), epochs = atoi(argv[4]), N = B * T;
    const float rate = atof(argv[5]), gamma = atof(argv[6]), lambda = atof(argv[7]), entropy_weight = atof(argv[8]);
    const long total = atol(argv[9]);
    random_state = 0x9E3779B97F4A7C15ull * (atoi(argv[10]) + 1);

    const int actor_size = net_size(ACTIONS), size = actor_size + net_size(1), widest = N + B > minibatch ? N + B : minibatch;
    float *weights = floats(size), *gradient = floats(size), *first = floats(size), *second = floats(size);
    Net actor = net_at(weights, ACTIONS), critic = net_at(weights + actor_size, 1);
    Net actor_grad = net_at(gradient, ACTIONS), critic_grad = net_at(gradient + actor_size, 1);
    orthogonal(actor.w1, OBS, HIDDEN, sqrt(2)), orthogonal(actor.w2, HIDDEN, HIDDEN, sqrt(2)), orthogonal(actor.w3, ACTIONS, HIDDEN, 0.01);
    orthogonal(critic.w1, OBS, HIDDEN, sqrt(2)), orthogonal(critic.w2, HIDDEN, HIDDEN, sqrt(2)), orthogonal(critic.w3, 1, HIDDEN, 1);
    Room actor_room, critic_room, *rooms[] = {&actor_room, &critic_room};
    for (int i = 0; i < 2; i++) {
        float **parts[] = {&rooms[i]->h1, &rooms[i]->h2, &rooms[i]->d1, &rooms[i]->d2};
        for (int k = 0; k < 4; k++) *parts[k] = floats((size_t)widest * HIDDEN);
        rooms[i]->turned = floats(HIDDEN * HIDDEN);
    }
    float *seen = floats((size_t)(N + B) * OBS), *log_probs = floats(N), *values = floats(N + B), *next = floats(N); /* [T + 1, B] */
    float *advantages = floats(N), *returns = floats(N), *last_seen = floats(OBS), *logits = floats((size_t)widest * ACTIONS);
    float *x = floats((size_t)minibatch * OBS), *dlogits = floats((size_t)minibatch * ACTIONS), *v = floats(minibatch), *dv = floats(minibatch);
    int *actions = malloc(N * sizeof *actions), *order = malloc(N * sizeof *order);
    unsigned char *fell = malloc(N), *cut = malloc(N);
    Pole *poles = malloc(B * sizeof *poles);
    double recent[RECENT] = {0}, learning = 0, began = now();
    long episodes = 0, updates = 0, steps = 0;
    for (int b = 0; b < B; b++) reset(&poles[b]);
    for (int i = 0; i < N; i++) order[i] = i;

    while (steps < total) {
        for (int t = 0; t < T; t++) { /* collect */
            float *rows = seen + (size_t)t * B * OBS;
            for (int b = 0; b < B; b++) look(&poles[b], rows + b * OBS);
            forward(&actor, B, rows, &actor_room, logits);
            for (int b = 0; b < B; b++) {
                int i = t * B + b;
                float odds = logits[2 * b + 1] - logits[2 * b], p = 1 / (1 + expf(-odds)); /* of pushing right */
                actions[i] = uniform() < p, log_probs[i] = logf(actions[i] ? p : 1 - p);
                fell[i] = step(&poles[b], actions[i]), cut[i] = !fell[i] && poles[b].length >= LIMIT, next[i] = 0;
                if (fell[i] | cut[i]) {
                    if (cut[i]) look(&poles[b], last_seen), forward(&critic, 1, last_seen, &critic_room, &next[i]);
                    recent[episodes++ % RECENT] = poles[b].length, reset(&poles[b]);
                }
            }
        }
        steps += N;
        double collected = now();
        for (int b = 0; b < B; b++) look(&poles[b], seen + (size_t)(N + b) * OBS);
        forward(&critic, N + B, seen, &critic_room, values);
        for (int b = 0; b < B; b++) { /* advantages, backwards in time */
            float after = 0;
            for (int t = T - 1; t >= 0; t--) {
                int i = t * B + b;
                float successor = fell[i] ? 0 : cut[i] ? next[i] : values[i + B];
                after = 1 + gamma * successor - values[i] + (fell[i] | cut[i] ? 0 : gamma * lambda * after);
                advantages[i] = after, returns[i] = after + values[i];
            }
        }
        for (int epoch = 0; epoch < epochs; epoch++) {
            for (int i = N - 1; i > 0; i--) {
                int j = random_bits() % (i + 1), kept = order[i];
                order[i] = order[j], order[j] = kept;
            }
            for (int start = 0; start < N; start += minibatch) {
                int n = N - start < minibatch ? N - start : minibatch, *chosen = order + start;
                double sum = 0, squares = 0;
                for (int r = 0; r < n; r++) {
                    memcpy(x + r * OBS, seen + (size_t)chosen[r] * OBS, OBS * sizeof(float));
                    sum += advantages[chosen[r]], squares += (double)advantages[chosen[r]] * advantages[chosen[r]];
                }
                float mean = sum / n, scale = 1 / (sqrt(fmax(squares - sum * sum / n, 0) / (n - 1)) + 1e-8);
                forward(&actor, n, x, &actor_room, logits), forward(&critic, n, x, &critic_room, v);
                for (int r = 0; r < n; r++) {
                    int i = chosen[r];
                    float odds = logits[2 * r + 1] - logits[2 * r], right = 1 / (1 + expf(-odds)), p = actions[i] ? right : 1 - right;
                    float advantage = (advantages[i] - mean) * scale, ratio = expf(logf(p) - log_probs[i]);
                    int clipped = advantage > 0 ? ratio > 1.2f : ratio < 0.8f;
                    float dlogp = clipped ? 0 : -advantage * ratio / n;                   /* of the loss by log p(action) */
                    float dodds = dlogp * (actions[i] ? 1 - right : -right);              /* d log p / d odds */
                    dodds += entropy_weight * right * (1 - right) * odds / n;             /* entropy' = -p (1 - p) odds */
                    dlogits[2 * r + 1] = dodds, dlogits[2 * r] = -dodds;
                    dv[r] = (v[r] - returns[i]) / n;                                      /* of half the mean squared error */
                }
                backward(&actor, &actor_grad, n, x, &actor_room, dlogits), backward(&critic, &critic_grad, n, x, &critic_room, dv);
                float norm = 0;
                for (int i = 0; i < size; i++) norm += gradient[i] * gradient[i];
                norm = sqrtf(norm), updates++;
                float shrink = norm > 0.5f ? 0.5f / (norm + 1e-6f) : 1, fix1 = 1 / (1 - pow(0.9, updates)), fix2 = 1 / (1 - pow(0.999, updates));
                for (int i = 0; i < size; i++) { /* Adam */
                    float g = gradient[i] * shrink;
                    first[i] += 0.1f * (g - first[i]), second[i] += 0.001f * (g * g - second[i]);
                    weights[i] -= rate * (first[i] * fix1) / (sqrtf(second[i] * fix2) + 1e-5f);
                }
            }
        }
        learning += now() - collected;
    }
    double seconds = now() - began, mean = 0;
    long counted = episodes < RECENT ? episodes : RECENT;
    for (int i = 0; i < counted; i++) mean += recent[i] / counted;
    printf("{\"steps\": %ld, \"seconds\": %.6f, \"learn_seconds\": %.6f, \"last_return\": %.2f, \"checksum\": %.6f}\n", steps, seconds, learning,
           mean, weights[0]);
    return 0;
}

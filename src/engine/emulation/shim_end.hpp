
// Runs the blocks of a launch one after another, and their threads by this.
static void run_thread();
#ifdef WAITS
static thread_local enum { NEW, WAITING, FINISHED } progress[THREADS];

static void fiber() {
    run_thread();
    progress[threadIdx.x] = FINISHED;
    _longjmp(scheduler, 1);
}

// Runs a thread up to its next barrier, or to its end. It comes back by a jump.
static void go_on(char* stacks) {
    if (_setjmp(scheduler)) return;
    if (progress[threadIdx.x] == WAITING) _longjmp(waiting[threadIdx.x], 1);
    progress[threadIdx.x] = WAITING;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks + (unsigned long)threadIdx.x * STACK;
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, fiber, 0);
    setcontext(&start);
}

static void run_blocks(unsigned int blocks) {
    char* stacks = (char*)__builtin_malloc((unsigned long)THREADS * STACK);
    waiting = (jmp_buf*)__builtin_malloc(THREADS * sizeof(jmp_buf));
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (unsigned int thread = 0; thread < THREADS; ++thread) progress[thread] = NEW;
        for (bool left = true; left;) {
            left = false;
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
                if (progress[threadIdx.x] != FINISHED) go_on(stacks);
                left = left || progress[threadIdx.x] != FINISHED;
            }
        }
    }
    __builtin_free(waiting);
    __builtin_free(stacks);
}
#else
static void run_blocks(unsigned int blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) run_thread();
}
#endif
